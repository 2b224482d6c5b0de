"""A small file with tensors of the real model, for where all of it would take too long."""

from __future__ import annotations

from pathlib import Path

import weightwire

LARGE = "token_embd.weight"
#: Rows of the one large tensor that are kept: 12.97 MiB.
ROWS = 20_000


def write_slice(model: Path, path: Path) -> None:
    """Write the first block of ``model`` and the first rows of its large tensor, byte for byte, as a GGUF."""
    # Not where this module is imported: that would be in the guest too, where it takes seconds.
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "gemma3")
    with weightwire.open_model(model) as opened:
        for name, tensor in opened.tensors.items():
            if not (name == LARGE or name.startswith("blk.0.")):
                continue
            assert tensor.type_code is not None
            kind = gguf.GGMLQuantizationType(tensor.type_code)
            rows = np.frombuffer(tensor.view(), np.uint8).reshape(-1, tensor.nbytes // int(np.prod(tensor.ne[1:])))
            if kind is gguf.GGMLQuantizationType.F32:
                writer.add_tensor(name, rows.view(np.float32).reshape(tensor.ne[::-1]))
            else:
                writer.add_tensor(name, rows[: ROWS if name == LARGE else None], raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
