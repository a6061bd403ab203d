"""A container's health check: 0 when the URL answers 200. Standard library only, so that every image can run it."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request


def main() -> int:
    """The check of the URL in the first argument; the line that it prints shows in `docker inspect`."""
    url = sys.argv[1]
    try:
        with urllib.request.urlopen(url, timeout=20) as reply:
            print(f"{url}: {reply.status}")
            return 0 if reply.status == 200 else 1
    except urllib.error.HTTPError as error:
        print(f"{url}: {error.code}: it runs but is not ready (a model may still be loading)")
    except (urllib.error.URLError, OSError) as error:
        print(f"{url}: no answer: {error}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
