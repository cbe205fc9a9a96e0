"""JSON schemas like those that applications send, each with bounded texts so that any model ends its answer."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def record(required: list[str] | None = None, **properties: Schema) -> Schema:
    """Return the schema of a closed object; required: all properties by default."""
    return {
        "type": "object", "properties": properties, "additionalProperties": False,
        "required": list(properties) if required is None else required,
    }  # fmt: skip


def text(most: int = 12, least: int = 0) -> Schema:
    """Return the schema of a short text."""
    return {"type": "string", "minLength": least, "maxLength": most}


def items(of: Schema, least: int, most: int) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": of, "minItems": least, "maxItems": most}


def number(kind: str, **limits: float) -> Schema:
    """Return the schema of a number in a range."""
    return {"type": kind, **limits}


def integer(least: int, most: int) -> Schema:
    """Return the schema of an integer in a range."""
    return number("integer", minimum=least, maximum=most)


ADDRESS = record(street=text(), city=text(8, 1), zip={"type": "string", "pattern": "^[0-9]{5}$"})
MONEY = record(
    amount=number("number", minimum=0, maximum=1000), currency={"enum": ["EUR", "USD", "NOK"]}
)  # fmt: skip
SCHEMAS: dict[str, Schema] = {
    "person": record(name=text(), age=integer(0, 120), member={"type": "boolean"}),
    "sentiment": record(label={"enum": ["positive", "neutral", "negative"]}, score=integer(1, 5)),
    "address": record(home=ADDRESS, work=ADDRESS),
    "invoice": record(
        id={"type": "string", "pattern": "^INV-[0-9]{4}$"},
        total=MONEY,
        lines=items(record(item=text(8), quantity=integer(1, 99), price=MONEY), 1, 3),
    ),
    "tags": record(tags=items(text(8, 1), 2, 4)),
    "meeting": record(
        title=text(),
        start={"type": "string", "format": "date-time"},
        day={"type": "string", "format": "date"},
        invited=items({"type": "string", "enum": ["ann", "bob", "eve"]}, 1, 3),
    ),
    "contact": record(id={"type": "string", "format": "uuid"}, host={"type": "string", "format": "ipv4"}),
    "either": record(value={"anyOf": [integer(-5, 5), text(6), {"type": "null"}]}),
    "shape": {
        "anyOf": [
            record(kind={"const": "circle"}, radius=number("number", exclusiveMinimum=0, maximum=9)),
            record(kind={"const": "box"}, width=integer(1, 9), height=integer(1, 9)),
        ]
    },
    "by reference": {
        **record(billing={"$ref": "#/$defs/address"}, shipping={"$ref": "#/$defs/address"}),
        "$defs": {"address": ADDRESS},
    },
    "tree": {
        **record(root={"$ref": "#/$defs/node"}),
        "$defs": {
            "node": record(["name"], name=text(4, 1), left={"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]}),
            "leaf": record(name=text(3, 1)),
        },
    },
    "optional": record(["id"], id=integer(1, 9), note=text(5), score=integer(0, 9)),
    "weather": record(
        city=text(10, 1),
        celsius=integer(-60, 60),
        wind=number("number", minimum=0, maximum=80),
        sky={"enum": ["clear", "cloudy", "rain", "snow"]},
    ),
    "matrix": record(rows=items(items(integer(0, 9), 3, 3), 2, 2)),
    "pair": record(
        point={
            "type": "array",
            "prefixItems": [integer(0, 99), {"enum": ["m", "km"]}],
            "items": False,
            "minItems": 2,
            "maxItems": 2,
        }
    ),
    "plan": record(
        goal=text(10),
        steps=items(record(number=integer(1, 9), action=text(10), risk={"enum": ["low", "high"]}), 1, 3),
        done={"const": False},
    ),
    "version": record(
        version={"type": "string", "pattern": "^[0-9]{1,2}\\.[0-9]{1,2}\\.[0-9]{1,2}$"},
        channel={"enum": ["stable", "beta", None]},
    ),
    "multiple": record(minutes=number("integer", minimum=0, maximum=60, multipleOf=15)),
    "configuration": {
        **record(
            port=integer(1024, 65535), debug={"type": "boolean"}, level={"type": ["string", "null"], "maxLength": 5}
        ),
        "title": "Configuration",
        "description": "Options of a server.",
        "$schema": "https://json-schema.org/draft/2020-12/schema",
    },
    "unicode": record(None, **{"größe": integer(1, 3), 'naïve "key"': {"enum": ["日本", "é\n"]}}),
    "list of records": items(record(id=integer(1, 99), ok={"type": "boolean"}), 1, 3),
    "word": {"enum": ["yes", "no", 3, None]},
    "all of": {"allOf": [record(a=integer(0, 9), b=text(3)), {"type": "object"}]},
    "one of": record(
        payment={
            "oneOf": [
                record(kind={"const": "card"}, last={"type": "string", "pattern": "^[0-9]{4}$"}),
                record(kind={"const": "cash"}),
            ]
        }
    ),
}
