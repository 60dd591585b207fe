"""The command line: parse, make one call, report, exit."""
