"""Count the scans of a JPEG file, without decoding one.

A progressive JPEG refines its image scan by scan. A scan of a few bytes may refine all of it by nothing, which takes
the decoder as long as one that refines something: 110,000 of them fit into 6 MB and take a quarter of an hour.
"""

from __future__ import annotations

import re

MAX_SCANS = 100  # usual programs write about ten
MAX_SEGMENTS = 10_000  # between the scans, too; a profile of colors has 255 at most
# What begins a segment, or ends the image. As in decoders, other bytes before it are skipped, and so are markers of no
# segment, such as the restarts within a scan, of which there may be very many.
_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd8\xff])")
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9


def has_too_many_scans(data: bytes) -> bool:
    """Return whether a JPEG file has more scans, or more segments, than any program writes."""
    position = num_scans = num_segments = 0
    while (match := _MARKER.search(data, position)) is not None:
        kind, position = match[1][0], match.end()
        if kind == _END_OF_IMAGE:  # what follows is not decoded: some cameras append a film
            return False
        num_segments += 1
        num_scans += kind == _START_OF_SCAN
        if num_scans > MAX_SCANS or num_segments > MAX_SEGMENTS:
            return True
        position += max(2, int.from_bytes(data[position : position + 2], "big"))  # the length counts itself
    return False
