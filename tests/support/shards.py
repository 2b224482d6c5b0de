"""Models in several files, as gguf-split would have made them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np


def write_shards(folder: Path, tensors: Mapping[str, bytes], each: int) -> list[Path]:
    """Write ``tensors`` as int8 to GGUF files of at most ``each`` of them; the files, in order."""
    writer = gguf.GGUFWriter(folder / "split.gguf", "llama", split_max_tensors=each)
    for name, data in tensors.items():
        writer.add_tensor(name, np.frombuffer(data, np.int8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("split-*-of-*.gguf"))
