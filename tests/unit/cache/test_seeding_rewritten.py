"""Seeding from a model that is rewritten in place meanwhile, with its date set back."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cachedir import contents, files_in, name_of, write_model
from support.rewriting import rewrite

from weightwire.cache import seed
from weightwire.errors import ModelError
from weightwire.index import HashIndex


@pytest.mark.usefixtures("small_threshold")
@pytest.mark.parametrize("threads", [0, 2])
def test_a_model_that_is_rewritten_with_its_old_date(tmp_path: Path, threads: int, index: HashIndex) -> None:
    model = write_model(tmp_path / "model.safetensors", contents(1001, 5000, 70_000, 3 << 20))
    directory = tmp_path / "entries"
    rewritten = []

    def once(name: str, done: int, total: int) -> None:
        if not rewritten:
            rewritten.append(name)
            rewrite(model)

    with pytest.raises(ModelError, match="though its date is the same"):
        seed(model, directory, threads=threads, index=index, progress=once)
    for name, data in files_in(directory).items():
        assert name == name_of(data)
    assert index.owners() == {}
