"""The web page: `stylize serve`. Needs the extra `[web]`; nothing in here knows the method."""
