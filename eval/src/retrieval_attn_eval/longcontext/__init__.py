"""Long-context suites besides RULER and InfiniteBench: generated forms that need many places of a text, and files.

MRCR, GraphWalks, OOLONG-synth and Text2JSON are made up here after their published definitions, at any length; none of
their data is used. LongBench v2, HELMET and NoLiMa are read from their published files.
"""
