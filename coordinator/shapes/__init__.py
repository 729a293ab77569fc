"""What clients of other makers send and expect, translated to and from our own words. Pure; knows no HTTP."""
