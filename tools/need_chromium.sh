#!/usr/bin/env bash
# See that Debian's Chromium and its driver are here; install them where that is allowed.
set -euo pipefail

have() { command -v chromium >/dev/null && command -v chromedriver >/dev/null; }

have && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update && apt-get install -y --no-install-recommends chromium chromium-driver; } >/dev/null 2>&1 || true
fi
have || { echo "This needs a browser. Run as root: apt-get install chromium chromium-driver" >&2; exit 1; }
