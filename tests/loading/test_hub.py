"""Loading by Hub id, against a Hub made of a few lines that runs on this machine."""

import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants, file_download, hf_api
from huggingface_hub.utils import close_session
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from checkpoints import (
    DFLASH,
    GOLDEN,
    VANILLA,
    copy_checkpoint,
    no_weights_loaded,
    same_weights,
    shard,
)
from dspark_hf import DSparkDrafter, UnsupportedCheckpointError, export_drafter
from dspark_hf.loading.checkpoint import read_facts
from dspark_hf.loading.description import describe
from fake_hub import OWN, PRIVATE, PUBLISHED, TOKEN, WEIGHTS, FakeHub, commit_of
from tiny import make_drafter
from tiny_v4 import V4, load_golden_drafter


@pytest.fixture(scope="module")
def drafters(tmp_path_factory):
    """Two revisions of a checkpoint of ours, larger than what a header request may fetch."""
    folders = {}
    for seed, revision in enumerate(("main", "v2")):
        folder = tmp_path_factory.mktemp(revision)
        drafter = make_drafter(vocab_size=2000, seed=seed)
        drafter.generation_config.dspark_confidence_threshold = 0.25
        drafter.save_pretrained(folder)
        folders[revision] = folder, drafter
    return folders


@pytest.fixture
def hub(monkeypatch, tmp_path, drafters):
    server = FakeHub()
    for revision, (folder, _) in drafters.items():
        server.add(OWN, folder, revision)
    server.add(PRIVATE, drafters["main"][0])
    server.add(PUBLISHED, copy_checkpoint(tmp_path / "published"))
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        endpoint + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(hf_api.api, "endpoint", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "default_cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    close_session()
    yield server
    close_session()
    server.stop()


def test_a_drafter_is_loaded_by_id(hub, drafters):
    """Files, config and generation config; the cache is the default one."""
    loaded, info = DSparkDrafter.from_pretrained(OWN, output_loading_info=True)
    assert not info["missing_keys"]
    assert same_weights(loaded, drafters["main"][1])
    assert loaded.generation_config.dspark_confidence_threshold == 0.25
    assert loaded.config.name_or_path == OWN
    assert Path(constants.HF_HUB_CACHE).is_dir()


@pytest.mark.parametrize("sharded", [False, True])
def test_a_published_layout_is_loaded_by_id(hub, tmp_path, sharded):
    """B074, B075."""
    folder = hub.folders[PUBLISHED, "main"]
    local = DSparkDrafter.from_pretrained(copy_checkpoint(tmp_path / "copy"))
    if sharded:
        shard(folder)
    loaded = DSparkDrafter.from_pretrained(PUBLISHED)
    assert same_weights(loaded, local)


def test_a_revision_is_honoured_by_config_and_weights(hub, drafters):
    """Branch or commit; every request of the call names it."""
    loaded = DSparkDrafter.from_pretrained(OWN, revision="v2")
    assert same_weights(loaded, drafters["v2"][1])
    assert not same_weights(loaded, drafters["main"][1])
    paths = [path for _, path, _ in hub.requests if "/resolve/" in path]
    assert paths
    assert not [path for path in paths if "/resolve/main/" in path]
    by_commit = DSparkDrafter.from_pretrained(OWN, revision=commit_of(OWN, "v2"))
    assert same_weights(by_commit, loaded)


def test_an_unknown_revision(hub):
    """The revision is named."""
    with no_weights_loaded(), pytest.raises(OSError, match="v9 is not a valid git identifier"):
        DSparkDrafter.from_pretrained(OWN, revision="v9")


def test_a_token_travels_as_authorization(hub, drafters):
    """With it a private repository opens, for every file; without it there is no such one."""
    with no_weights_loaded(), pytest.raises(OSError, match="token"):
        DSparkDrafter.from_pretrained(PRIVATE, token=False)
    hub.requests.clear()
    loaded = DSparkDrafter.from_pretrained(PRIVATE, token=TOKEN)
    assert same_weights(loaded, drafters["main"][1])
    sent = {
        headers.get("Authorization", headers.get("authorization")) for *_, headers in hub.requests
    }
    assert sent == {f"Bearer {TOKEN}"}
    assert describe(PRIVATE, token=TOKEN)["source"] == PRIVATE


def test_a_cache_folder_is_used_and_enough(hub, drafters, tmp_path):
    """`cache_dir`, then `local_files_only` with no server left."""
    cache = tmp_path / "cache"
    DSparkDrafter.from_pretrained(OWN, cache_dir=cache)
    assert not Path(constants.HF_HUB_CACHE).exists()
    assert list(cache.glob("models--somebody--own/snapshots/*/model.safetensors"))
    hub.stop()
    number = len(hub.requests)
    loaded = DSparkDrafter.from_pretrained(OWN, cache_dir=cache, local_files_only=True)
    assert same_weights(loaded, drafters["main"][1])
    assert loaded.generation_config.dspark_confidence_threshold == 0.25
    facts = describe(OWN, cache_dir=cache, local_files_only=True)
    assert facts["num_parameters"] == sum(p.numel() for p in loaded.parameters())
    assert len(hub.requests) == number


def test_offline_mode_reads_the_cache(hub, drafters, monkeypatch):
    """The environment switch of the host's client."""
    DSparkDrafter.from_pretrained(OWN)
    hub.stop()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert same_weights(DSparkDrafter.from_pretrained(OWN), drafters["main"][1])
    assert describe(OWN)["num_tensors"] == 31


def test_what_is_not_in_the_cache_cannot_be_loaded_offline(hub, tmp_path):
    """And the message says that the cache was looked at."""
    message = f"No config.json of {OWN} was found.*the cache has none"
    with no_weights_loaded(), pytest.raises(OSError, match=message):
        DSparkDrafter.from_pretrained(OWN, cache_dir=tmp_path / "empty", local_files_only=True)
    assert not hub.requests


def test_a_repository_that_does_not_exist(hub):
    """Its id is named, and what else could be the cause."""
    message = "nobody/nothing is not a local folder and is not a valid model identifier.*token"
    for load in (DSparkDrafter.from_pretrained, describe):
        with no_weights_loaded(), pytest.raises(OSError, match=f"(?s){message}"):
            load("nobody/nothing")


def test_a_repository_without_safetensors(hub, tmp_path):
    """Pickled weights are not even fetched."""
    folder = hub.folders[PUBLISHED, "main"]
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    for load in (DSparkDrafter.from_pretrained, describe):
        with no_weights_loaded(), pytest.raises(OSError, match=r"Only safetensors .*pickled"):
            load(PUBLISHED)
    assert not hub.sent["pytorch_model.bin"]


def test_a_repository_that_misses_a_shard(hub):
    """The shard is named."""
    folder = hub.folders[PUBLISHED, "main"]
    name = shard(folder)[2]
    (folder / name).unlink()
    with no_weights_loaded(), pytest.raises(OSError, match=f"its index lists {name}"):
        DSparkDrafter.from_pretrained(PUBLISHED)


def test_an_unreadable_layout_costs_no_download(hub, tmp_path):
    """B075: refused by its config, before gigabytes travel."""
    foreign = copy_checkpoint(tmp_path / "foreign", DFLASH, architectures=["K3DSparkModel"])
    hub.add("z/foreign", foreign)
    for load in (DSparkDrafter.from_pretrained, describe):
        with no_weights_loaded(), pytest.raises(UnsupportedCheckpointError, match="Kimi K3"):
            load("z/foreign")
    assert set(hub.sent) == {"config.json"}


def test_facts_are_read_from_headers_only(hub, drafters):
    """A description of a large checkpoint fetches a small part of its weight file."""
    folder, drafter = drafters["main"]
    size = (folder / WEIGHTS).stat().st_size
    assert size > 400_000
    facts = read_facts(DSparkDrafter, OWN, download_weights=False)
    assert 0 < hub.sent[WEIGHTS] < size / 2
    expected = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    assert {name: info.shape for name, info in facts.tensors.items()} == expected
    assert {(info.dtype, info.file) for info in facts.tensors.values()} == {("F32", WEIGHTS)}
    description = describe(OWN)
    assert description == {**describe(str(folder)), "source": OWN}


def test_facts_of_shards_are_read_from_headers_only(hub):
    """The same for an index and its shards."""
    folder = hub.folders[PUBLISHED, "main"]
    local = describe(str(folder))
    names = shard(folder)
    assert describe(PUBLISHED) == {**local, "source": PUBLISHED, "files": names}


def test_misfitting_weights_are_found_by_their_headers(hub, tmp_path):
    """B070, B111: a description checks what loading would check."""
    hub.add("lab/odd", copy_checkpoint(tmp_path / "odd", VANILLA, markov_rank=16))
    with pytest.raises(ValueError, match=r"markov_w1.weight has shape .160, 8.* asks for .160, 16"):
        describe("lab/odd")


def test_a_cache_that_cannot_be_written(hub, tmp_path):
    """The folder is named, and what to set instead."""
    (tmp_path / "file").write_text("x", encoding="utf-8")
    cache = tmp_path / "file" / "cache"
    message = f"Hub cache cannot be written .*{cache}.* Pass cache_dir"
    with no_weights_loaded(), pytest.raises(OSError, match=message):
        DSparkDrafter.from_pretrained(OWN, cache_dir=cache)


def test_a_generic_auto_class_names_the_right_call(hub):
    """B075: a published drafter by id is not turned into an ordinary small model."""
    message = rf"DSparkDrafter\.from_pretrained\('{PUBLISHED}'\)"
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(PUBLISHED)
    assert not hub.sent[WEIGHTS]


def test_an_auto_class_loads_our_layout_by_id(hub, drafters):
    """B076."""
    loaded = AutoModelForCausalLM.from_pretrained(OWN, revision="v2", dtype=torch.bfloat16)
    assert type(loaded) is DSparkDrafter
    assert loaded.dtype == torch.bfloat16
    assert same_weights(loaded.float(), drafters["v2"][1].bfloat16().float())


def test_a_server_that_went_away_leaves_the_cache(hub, drafters):
    """Without any switch: what was downloaded once is used."""
    DSparkDrafter.from_pretrained(OWN)
    hub.stop()
    assert same_weights(DSparkDrafter.from_pretrained(OWN), drafters["main"][1])


@pytest.mark.parametrize("layout", ["deepspec", "speculators"])
def test_an_export_is_uploaded_and_loaded_by_id(hub, tmp_path, layout):
    """The repository is made, all files travel with the token, and what comes back is equal."""
    drafter = make_drafter()
    (tmp_path / "remote").mkdir()
    hub.add("somebody/exported", tmp_path / "remote")
    folder = export_drafter(
        drafter,
        tmp_path / "local",
        layout,
        target_name="somebody/target",
        repo_id="somebody/exported",
        private=True,
        token=TOKEN,
    )
    assert hub.created == {"somebody/exported": True}
    sent = {file.name for file in (tmp_path / "remote").iterdir()}
    assert sent == {file.name for file in folder.iterdir()} >= {"README.md", "config.json", WEIGHTS}
    card = (tmp_path / "remote" / "README.md").read_text(encoding="utf-8")
    assert 'from_pretrained("somebody/exported"' in card
    loaded = DSparkDrafter.from_pretrained("somebody/exported")
    assert same_weights(loaded, drafter)
    tokens = {
        h.get("Authorization", h.get("authorization")) for m, _, h in hub.requests if m == "POST"
    }
    assert tokens == {f"Bearer {TOKEN}"}


def test_an_upload_that_is_refused_leaves_the_files(hub, tmp_path):
    """The export itself is complete."""
    with pytest.raises(OSError, match=r"401|Repository Not Found|Unauthorized"):
        export_drafter(
            make_drafter(),
            tmp_path / "local",
            "deepspec",
            repo_id="somebody/exported",
            token="hf_x",
        )
    DSparkDrafter.from_pretrained(tmp_path / "local")


# -- a drafter inside a target's repository

V4_REPO = "deepseek-ai/DeepSeek-V4-Tiny-DSpark"
V4_SHARDS = [f"model-0000{number}-of-00004.safetensors" for number in (2, 3, 4)]


def add_v4(hub, tmp_path):
    folder = shutil.copytree(GOLDEN / V4, tmp_path / "deepseek_v4")
    # Shards larger than what a header request may fetch.
    for name in V4_SHARDS:
        tensors = load_file(folder / name)
        tensors["layers.9.padding"] = torch.zeros(200_000)
        save_file(tensors, folder / name, metadata={"format": "pt"})
    hub.add(V4_REPO, folder)
    return folder


def test_only_the_files_of_an_embedded_drafter_are_fetched(hub, tmp_path, monkeypatch):
    """Three of the shards, config and index; nothing of the target. Then it loads offline."""
    folder = add_v4(hub, tmp_path)
    loaded = DSparkDrafter.from_pretrained(V4_REPO)
    assert same_weights(loaded, load_golden_drafter(bound=False))
    assert set(hub.sent) == {"config.json", "model.safetensors.index.json", *V4_SHARDS}
    for name in V4_SHARDS:
        assert hub.sent[name] == (folder / name).stat().st_size
    assert not any("model-00001" in path for _, path, _ in hub.requests)
    bodies = [path for method, path, _ in hub.requests if method == "GET" and "model-0" in path]
    assert len(bodies) == len(V4_SHARDS)
    assert loaded.config.name_or_path == V4_REPO
    hub.stop()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert same_weights(DSparkDrafter.from_pretrained(V4_REPO), loaded)


@pytest.mark.parametrize("given_up", [False, True])
def test_a_download_that_broke_off_goes_on(hub, tmp_path, monkeypatch, given_up):
    """In the same call behind the last byte; in a later one behind the last whole file."""
    folder = add_v4(hub, tmp_path)
    sizes = [(folder / name).stat().st_size for name in V4_SHARDS]
    hub.breaks[V4_SHARDS[1]] = 300_000
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)

    def wait(seconds):
        if given_up:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(file_download.time, "sleep", wait)
        if given_up:
            with pytest.raises(KeyboardInterrupt):
                DSparkDrafter.from_pretrained(V4_REPO)
        else:
            DSparkDrafter.from_pretrained(V4_REPO)
    loaded = DSparkDrafter.from_pretrained(V4_REPO)
    assert same_weights(loaded, load_golden_drafter(bound=False))
    asked = [
        headers.get("Range", headers.get("range"))
        for method, path, headers in hub.requests
        if method == "GET" and V4_SHARDS[1] in path
    ]
    assert asked == [None, None if given_up else "bytes=300000-"]
    sizes[1] += 300_000 * given_up
    assert [hub.sent[name] for name in V4_SHARDS] == sizes


@pytest.mark.parametrize("repo", [V4_REPO, OWN])
def test_a_forced_download_happens_once(hub, tmp_path, repo):
    """`force_download` on the next of several look-ups would fetch all of it again."""
    add_v4(hub, tmp_path)
    DSparkDrafter.from_pretrained(repo)
    first = dict(hub.sent)
    DSparkDrafter.from_pretrained(repo, force_download=True)
    for name in V4_SHARDS if repo == V4_REPO else [WEIGHTS]:
        assert hub.sent[name] == 2 * first[name] > 0


def test_the_plan_of_an_embedded_drafter_travels_without_its_weights(hub, tmp_path):
    """`dspark-hf inspect`: headers of the drafter's shards."""
    folder = add_v4(hub, tmp_path)
    found = describe(V4_REPO)
    assert found == {**describe(str(folder)), "source": V4_REPO}
    for name in V4_SHARDS:
        assert 0 < hub.sent[name] < (folder / name).stat().st_size
    assert not any("model-00001" in path for _, path, _ in hub.requests)


def test_a_shard_that_the_hub_has_lost(hub, tmp_path):
    folder = add_v4(hub, tmp_path)
    (folder / V4_SHARDS[1]).unlink()
    with pytest.raises(OSError, match="incomplete: its index lists model-00003-of-00004"):
        DSparkDrafter.from_pretrained(V4_REPO)
