"""Draws the SVGs of all chapters, or of those that are named: `python -m figures memory wgmma`."""

import sys

from figures import _draw

for chapter in sys.argv[1:] or _draw.chapters():
    for picture in _draw.pictures(chapter):
        picture.save()
