"""What a ladder of memories would do for a model, a load and a machine, before anything is bought.

Pure functions over data: no store, no device, no clock. Bytes are whole numbers of bytes, bandwidths bytes a second,
times seconds, prices US dollars. How each figure is made, and where its formula is from, is in docs/guide/sizing.md.
"""

from __future__ import annotations
