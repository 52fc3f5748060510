"""The timeline of a launch: what a build with MK_TRACE leaves, as tables, as a trace for Perfetto and as a picture."""
