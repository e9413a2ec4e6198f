"""Target states on disk: the same training, no torn files, no states of another target."""

import pytest
import torch

from dspark_hf.training.feature_cache import FeatureCache, bytes_per_token
from dspark_hf.training.target_states import TargetReader
from small_runs import assert_same_weights, limited_files, make_examples, make_trainer
from test_reduced_vocabulary import make_reduced
from tiny import make_drafter, make_target

LENGTHS = sum(len(example.input_ids) for example in make_examples().examples)


def make_cache(folder, target=None, taps=(0, 2), dataset=None, **options):
    reader = TargetReader(target or make_target(), list(taps), **options)
    return FeatureCache(folder, reader, dataset or make_examples())


@pytest.mark.parametrize("with_normaliser", [False, True])
def test_training_from_the_cache_equals_training_online(tmp_path, with_normaliser):
    """B139: with a reduced vocabulary and the stored normaliser too."""
    results = []
    cache = make_cache(tmp_path / "cache", with_normaliser=with_normaliser)
    cache.fill(progress=None)
    for caches in (None, (cache, None)):
        drafter = make_reduced(stored=False) if with_normaliser else make_drafter(stored=False)
        trainer = make_trainer(
            tmp_path,
            drafter,
            max_steps=3,
            per_device_train_batch_size=1,
            trainer_feature_caches=caches,
        )
        if caches:
            trainer.reader.target.model.forward = None  # Not run again.
        trainer.train()
        results.append(drafter.state_dict())
    online, cached = results
    if not with_normaliser:
        assert_same_weights(online, cached)
    for name in online:
        torch.testing.assert_close(online[name].float(), cached[name].float(), atol=2e-4, rtol=1e-3)


def test_other_examples_than_the_cached_ones_are_read_from_the_target(tmp_path):
    """Their places in their own dataset would find the states of others."""
    caches = [make_cache(tmp_path / name, dataset=make_examples(3, seed=1)) for name in "ab"]
    caches[1].fill(progress=None)
    trainer = make_trainer(tmp_path, validation=make_examples(3, seed=1))
    cached = make_trainer(
        tmp_path, validation=make_examples(3, seed=1), trainer_feature_caches=tuple(caches)
    )
    assert cached.evaluate() == trainer.evaluate()
    others = make_examples(3, seed=2)
    assert cached.evaluate(others) == trainer.evaluate(others)


def test_batches_are_padded_as_the_examples_are(tmp_path):
    cache = make_cache(tmp_path)
    cache.fill(progress=None)
    states = cache.load(torch.tensor([3, 0]), torch.device("cpu"))
    assert states.features.shape == (2, 23, 64)
    ids = torch.tensor([cache.dataset[0]["input_ids"]])
    alone = cache.reader(ids, torch.ones_like(ids))
    assert torch.equal(states.features[1, :20], alone.features[0])
    assert torch.equal(states.last_hidden[1, :20], alone.last_hidden[0])
    assert not states.features[1, 20:].any()
    assert states.log_normaliser is None


def test_the_announced_size_is_what_the_files_hold(tmp_path):
    for dtype, normaliser in ((torch.float32, True), (torch.bfloat16, False)):
        folder = tmp_path / str(dtype)
        cache = make_cache(folder, make_target().to(dtype), with_normaliser=normaliser)
        cache.fill(progress=None)
        announced = LENGTHS * bytes_per_token(cache.reader)
        stored = sum(file.stat().st_size for file in folder.iterdir())
        headers = 400 * len(cache.dataset)
        assert announced < stored < announced + headers


def test_an_interrupted_filling_goes_on(tmp_path, monkeypatch):
    cache = make_cache(tmp_path)
    calls, run = [], TargetReader.__call__

    def counted(self, *args):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(args)
        return run(self, *args)

    monkeypatch.setattr(TargetReader, "__call__", counted)
    with pytest.raises(KeyboardInterrupt):
        cache.fill(progress=None)
    calls.clear()
    calls.extend([None] * 10)
    cache.fill(progress=None)
    assert len(calls) == 10 + 4
    cache.fill(progress=None)
    assert len(calls) == 10 + 4


def test_a_full_disk_leaves_nothing_torn(tmp_path):
    cache = make_cache(tmp_path, dataset=make_examples(3, length=20))
    size = 23 * bytes_per_token(cache.reader)
    with limited_files() as limit:
        limit(size - 700)
        with pytest.raises(OSError, match="free some space and start again"):
            cache.fill(progress=None)
    assert all(file.suffix == ".safetensors" for file in tmp_path.iterdir())
    assert 0 < len(list(tmp_path.iterdir())) < 3
    cache.fill(progress=None)
    assert len(list(tmp_path.iterdir())) == 3


def test_states_of_another_target_taps_or_dtype_are_not_used(tmp_path):
    """Also those of a target of the same name that was trained further."""
    make_cache(tmp_path).fill(progress=None)
    others = [
        make_cache(tmp_path, make_target(seed=9)),
        make_cache(tmp_path, taps=(0, 1)),
        make_cache(tmp_path, make_target().bfloat16()),
        make_cache(tmp_path, with_normaliser=True),
    ]
    for number, other in enumerate(others, start=1):
        other.fill(progress=None)
        assert len(list(tmp_path.iterdir())) == 6 * (number + 1)
