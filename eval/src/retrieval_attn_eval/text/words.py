"""Word lists shared by the prose generator and the retrieval tasks.

Plain tuples of lower-case English words and of city names; no external data.  Words that would make a
retrieval answer ambiguous ("special", "magic", "pass key") are left out on purpose.
"""

from __future__ import annotations

__all__ = ["ACTIVITIES", "ADJECTIVES", "ADVERBS", "CITIES", "MATERIALS", "NOUNS", "PEOPLE", "PLACES", "TIMES"]


def entries(text: str) -> tuple[str, ...]:
    """Unique entries of a text block, first occurrence first: parted by commas if it has any, else by blanks."""
    parts = text.split("," if "," in text else None)
    return tuple(dict.fromkeys(" ".join(part.split()) for part in parts if part.strip()))


ADJECTIVES = entries("""
able absent active agile airy amber ample ancient angular ardent arid austere awkward balmy bare basic
bitter black bland bleak blue blunt bold brave brief bright brisk brittle broad bronze brown burnt busy
calm candid careful careless cautious chalky cheerful chilly civil clean clear clever cloudy clumsy
coarse cold common complex cool copper cosy costly cracked creaky crimson crisp crooked crowded cruel
curious curly damp daring dark deaf dear decent deep dense dim distant dizzy double doubtful dry dull
dusty eager early earthen easy elder elegant empty equal even exact faded faint fair faithful false
familiar famous fancy fast feeble fertile fierce final fine firm flat fleeting floral fluffy fond
foreign formal fragile frail frank free frequent fresh frosty frozen fruitful full funny fuzzy gentle
giant gifted glad gleaming global gloomy glossy golden gradual grand grassy grateful grave gray greasy
great greedy green grim groggy guilty handy happy hardy harsh hasty hazy heavy helpful hidden high
hoarse hollow honest humble humid hungry icy ideal idle immense inland inner intact iron itchy ivory
jagged jolly joyful juicy keen kind knotted known large late lazy lean legal level light likely limp
little lively local lonely long loose loud lovely loyal lucky lunar lush major marble marine mature
meadow meek mellow merry mild misty mobile modern modest moist mossy muddy murky mute narrow native neat
nervous new nimble noble noisy northern novel numb oak odd old olive open orange orderly outer oval pale
patient perfect petite placid plain playful pleasant plump polished polite poor portly prickly prime
private proper proud prudent public pungent pure purple quaint quick quiet rapid rare raw ready recent
red regal regular remote rich rigid ripe robust rocky rosy rotten rough round royal ruby rugged rural
rusty sacred safe salty sandy scarce scarlet secret selfish serene severe shabby shaded shady shaky
shallow sharp shiny short shy silent silky silly silver simple sincere sleek sleepy slender slight slim
slippery slow small smart smooth snowy sober social soft solar solemn solid sore sour southern spare
sparse spicy spiral splendid spotted square stable stale stark steady steep sterile stern sticky stiff
still stormy stout strange strict strong sturdy subtle sudden sunken sunny superb sweet swift tall tame
tangled tasty tender tense thick thin thirsty thorny tidy tight timid tiny tired tough tranquil tricky
true twin uneven upper urban useful usual vague valid vast velvet violet vivid wary wavy weary western
wet white whole wide wild willing windy winter wise witty wooden woolen worn worthy yellow young zealous
""")

NOUNS = entries("""
abbey acorn actor album alley almond almanac anchor ankle anthem anvil apple apron arbor arch armor
arrow artist ash atlas attic autumn avenue awning badge badger bakery balcony ball bamboo banjo bank
banner barge bark barley barn barrel basil basin basket bay beacon bead beam bean bear beard beaver bed
bee beetle bell bench berry bicycle birch bird biscuit blanket blossom board boat bolt bonfire bonnet
book boot border bottle boulder bowl box bracelet branch brass bread breeze brick bridge brook broom
brush bucket buckle bugle bulb bundle butter button cabin cable cactus cake calendar camel camera canal
candle canoe canvas canyon cape card cargo carpet carriage cart castle cat cattle cave cedar cellar
chain chair chalk chapel chapter charcoal chart cheese cherry chess chest chestnut chimney choir cider
circle citadel clam clay cliff cloak clock cloth cloud clover coal coast coat cobble coffee coin collar
comb comet compass cookie copse coral cork corn corner cottage cotton couch cousin cove crab cradle
crane crate creek cricket crown crystal cupboard current curtain cushion cypress dagger dairy daisy dam
dance dawn deck deer delta desert desk dew dial diary dice dinner dish ditch dock dolphin dome donkey
door dove dragonfly drain drawer dress drum duck dune dust eagle easel echo eclipse eel elbow elm ember
emblem engine envelope estuary evening fabric falcon farm feast feather fence fern ferry festival fiddle
field fig film finch fire fish flag flame flask fleet flint flock flood floor flour flower flute foam
fog folder forest forge fork fort fossil fountain fox frame freight frog frost fruit furnace gallery
gallon garden garlic garment gate gazette gear geyser ginger glacier glass globe glove glue goat gold
goose gorge grain granary granite grape grass gravel grove guitar gull gutter hail hall hammer hammock
harbor hare harp harvest hat hawk hay hazel heath hedge helmet hen herb heron hill hinge hive holly
honey hood hook horizon horn horse hotel hound house hut ice inlet ink inn insect iris island ivy jacket
jade jar jasmine jelly jewel journal journey juice juniper kayak kernel kettle key keyboard kiln kitchen
kite kitten knapsack knife knot lace ladder lagoon lake lamb lamp lantern lark latch laurel lava lawn
leaf leather ledger lemon lens letter lettuce library lichen lid lighthouse lilac lily lime linen lion
lizard loaf lock locket locomotive lodge log loom lotus lumber lute machine magnet magpie mallet mango
manor mansion mantle manuscript map maple mare market marsh mask mast mat meadowlark meal medal medley
melody melon merchant metal meteor mill mine mint mirror mist mitten moat mole moon moor morning mosaic
moss moth motor mountain mouse mud mug mule museum mushroom music mustard nail napkin needlework nest
net nettle newspaper night notebook nutmeg oar oasis oat ocean onion orchard orchid organ ornament otter
oven owl ox oyster paddle page pail paint palace palm pamphlet panel paper parade parcel park parrot
path pavement peach peacock pear pearl pebble pelican pen pencil pepper petal piano picture pie pier
pigeon pillar pillow pilot pine pipe pistachio pitcher plain planet plank plate plaza plough plum pocket
poem pond pony poplar poppy porch porridge port portrait postcard pot potato pottery prairie prism
puddle pulley pump pumpkin puppet puzzle quarry quartz quill quilt rabbit radio radish raft rail rain
rainbow raisin ramp ranch raven razor recipe reed reef ribbon rice ridge ring river road robe robin rock
roof root rope rose rudder rug saddle sail salmon salt sand sandal sapling sapphire satchel sauce saucer
scarf school scissors sculpture sea seal seed shadow shale shawl shed sheep shell shelter shield ship
shirt shoe shop shore shovel shrub shutter sickle signal silk sink skiff sky slate sleet sleigh slope
smoke snail snow soap sofa soil song soup spade spark sparrow spear spice spider spindle spire spoon
spring spruce square squash squirrel stable stadium stage stair stamp star statue steam steel stem stone
stool storm stove straw stream street string sugar suitcase summer sunset swallow swamp swan sweater
sword syrup table tablet tailor tapestry tavern tea temple tent theater thicket thimble thistle thread
throne thunder ticket tide tile timber tin toast tomato tool torch tower town toy trail train tray
treasure tree trellis trench trout trumpet trunk tulip tunnel turnip turtle twig umbrella valley vase
vault vessel vest village vine vinegar viola violin volcano wagon waist walnut walrus warehouse watch
water wave wax weather weaver well whale wharf wheat wheel whistle willow wind window wine wing wolf
wood wool workshop wreath wren yacht yard yarn yeast zebra zipper
""")

PEOPLE = entries("""
actor, apprentice, archer, architect, artist, astronomer, baker, barber, beekeeper, boatman, bookbinder,
botanist, bricklayer, brewer, builder, butcher, carpenter, cartographer, clerk, cobbler, collector,
composer, conductor, cook, dancer, doctor, driver, editor, engineer, farmer, ferryman, fiddler,
fisherman, florist, forester, gardener, geologist, glassblower, goldsmith, grocer, guard, guide, harbor
master, historian, hunter, innkeeper, inspector, inventor, jeweler, judge, keeper, librarian, locksmith,
mason, mechanic, merchant, messenger, miller, miner, musician, nurse, painter, pharmacist, photographer,
pilot, plumber, poet, porter, postman, potter, printer, professor, ranger, repairman, sailor, scholar,
sculptor, shepherd, shopkeeper, singer, smith, stranger, student, surgeon, surveyor, tailor, teacher,
traveler, vendor, watchmaker, weaver, widow, woodcutter, writer, young clerk, old captain, night
watchman, traveling actor, village elder, school principal, chess player, lighthouse keeper
""")

PLACES = entries("""
across the bay, across the square, along the canal, along the coast road, among the hills, at the edge
of town, at the end of the lane, at the foot of the mountain, at the old mill, at the railway station,
behind the bakery, behind the chapel, below the dam, beneath the bridge, beside the river, beside the
stove, between the two hills, beyond the orchard, by the harbor, by the open window, by the well, close
to the border, down by the docks, down the valley, far from the city, from the upper deck, in a corner
of the library, in a narrow alley, in a quiet suburb, in the attic, in the back room, in the botanical
garden, in the cellar, in the eastern district, in the field behind the school, in the great hall, in
the market, in the meadow, in the middle of the lake, in the mountains, in the museum, in the northern
provinces, in the shade of the elms, in the small kitchen, in the theater, in the village, in the
workshop, inside the greenhouse, near the customs house, near the fountain, near the lighthouse, near
the observatory, next to the post office, not far from the coast, off the main road, on the balcony, on
the far side of the island, on the ferry, on the front porch, on the hillside, on the old pier, on the
second floor, on the train, opposite the town hall, outside the city walls, over the rooftops, past the
tannery, round the bend of the road, through the pine forest, through the tunnel, under the arches,
under the oak tree, under the stairs, up the winding path, upstream from the ferry, within sight of the
sea
""")

TIMES = entries("""
after a long silence, after breakfast, after the concert, after the flood, after the harvest, all
afternoon, all through the winter, as the sun went down, at dawn, at first, at midnight, at noon, at
that moment, at the end of the season, before anyone noticed, before sunrise, before the storm, by the
end of the week, during the festival, during the long drought, during the war years, early in the
morning, every evening, every second year, for a fortnight, for most of the summer, for several months,
for three days, from time to time, in early spring, in late autumn, in the course of the evening, in the
following year, in those days, just after dark, last winter, late at night, later that day, many years
ago, more than once, most mornings, not long afterwards, on market days, on rainy days, on the first of
the month, on the last evening, once a week, one cold morning, one quiet afternoon, over the next few
days, since the previous spring, some weeks later, soon afterwards, the day before, the next morning,
this time, throughout the night, toward evening, twice a month, until the thaw, when the bells rang,
when the fog lifted, when the tide turned, while the kettle boiled, within the hour
""")

ADVERBS = entries("""
abruptly, almost, anxiously, awkwardly, badly, barely, boldly, bravely, briefly, calmly, carefully,
casually, cautiously, cheaply, cheerfully, clearly, closely, coldly, eagerly, easily, evenly, faintly,
firmly, frankly, freely, gently, gladly, gradually, happily, hastily, heavily, honestly, humbly, idly,
kindly, lazily, lightly, loudly, mildly, modestly, neatly, nervously, openly, patiently, plainly,
politely, poorly, promptly, proudly, quickly, quietly, rarely, readily, roughly, sadly, safely, seldom,
sharply, silently, simply, slowly, smoothly, softly, solemnly, soundly, steadily, sternly, strangely,
suddenly, swiftly, tenderly, thoroughly, tightly, warmly, weakly, wisely, without haste, with some
effort, with great care, with obvious pleasure, as usual
""")

MATERIALS = entries("""
amber, brass, bronze, canvas, cedar, clay, copper, cork, cotton, felt, flint, glass, gold leaf, granite,
iron, ivory, jade, lace, lead, leather, limestone, linen, marble, oak, paper, pewter, pine, plaster,
porcelain, sandstone, silk, silver, slate, steel, straw, terracotta, tin, velvet, walnut, wax, wicker,
wool
""")

CITIES = entries("""
Aberdeen, Accra, Adelaide, Algiers, Amsterdam, Ankara, Antwerp, Athens, Atlanta, Auckland, Austin,
Baghdad, Bangkok, Barcelona, Basel, Beijing, Beirut, Belfast, Belgrade, Bergen, Berlin, Bogota, Bologna,
Bordeaux, Boston, Brasilia, Bremen, Brisbane, Bristol, Brussels, Bucharest, Budapest, Buenos Aires,
Cairo, Calgary, Cape Town, Caracas, Cardiff, Casablanca, Chicago, Cologne, Copenhagen, Cordoba, Dakar,
Dallas, Delhi, Denver, Detroit, Dresden, Dubai, Dublin, Durban, Edinburgh, Florence, Frankfurt, Geneva,
Genoa, Glasgow, Granada, Hamburg, Hanoi, Havana, Helsinki, Hong Kong, Honolulu, Houston, Istanbul,
Jakarta, Johannesburg, Kampala, Kathmandu, Kiev, Kingston, Krakow, Kyoto, Lagos, Las Vegas, Leipzig,
Lima, Lisbon, Liverpool, Ljubljana, London, Los Angeles, Lucerne, Lyon, Madrid, Malaga, Manchester,
Manila, Marseille, Melbourne, Mexico City, Miami, Milan, Minneapolis, Monaco, Montevideo, Montreal,
Moscow, Mumbai, Munich, Nairobi, Naples, Nashville, New Orleans, New York, Nice, Osaka, Oslo, Ottawa,
Oxford, Palermo, Panama City, Paris, Perth, Philadelphia, Phoenix, Pittsburgh, Porto, Portland, Prague,
Quebec, Quito, Reykjavik, Riga, Rio de Janeiro, Rome, Rotterdam, Salzburg, San Diego, San Francisco,
Santiago, Sao Paulo, Sapporo, Seattle, Seoul, Seville, Shanghai, Singapore, Sofia, Stockholm, Stuttgart,
Sydney, Taipei, Tallinn, Tampa, Tbilisi, Tehran, Tokyo, Toronto, Toulouse, Tripoli, Tunis, Turin,
Utrecht, Valencia, Vancouver, Venice, Vienna, Vilnius, Warsaw, Washington, Wellington, Yokohama, Zagreb,
Zurich
""")

# verb phrases with holes: {a} adjective, {n} noun, {p} place
ACTIVITIES = entries("""
eat a sandwich and sit {p} on a {a} day, watch the {n} boats {p}, climb the {a} tower and look at the
{n}, ride a {a} bicycle {p}, taste the {a} {n} soup {p}, listen to {a} music {p}, visit the {n} museum
on a {a} morning, rent a {a} boat and row past the {n}, drink {a} tea {p}, walk {p} with a {a} dog, buy
a {a} {n} from the market, paint the {a} {n} {p}, take the {a} tram to the {n} garden, feed the {a}
ducks {p}, learn to bake {a} {n} bread, photograph the {a} {n} before sunrise, play chess with a {a}
stranger {p}, sleep {p} under a {a} blanket, join the {a} {n} festival, swim {p} after a {a} lunch,
read a {a} book about the {n} {p}, fly a {a} kite {p}, hear the {n} choir {p}, count the {a} swans {p}
""")
