"""The store's rules: versions, names, references, replacement, removal."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from heddle.lora.canonical import open_adapter
from heddle.lora.errors import AdapterCorrupt, AdapterInvalid
from heddle.lora.store import AdapterStore

from .peft_adapters import AdapterFolder
from .store_checks import blob_files, refused

# ------------------------------------------------------------------ versions


def test_first_registration_makes_version_1_and_the_same_weights_again_make_none(
    store: AdapterStore, folders: list[Path]
) -> None:
    first = store.register(folders[0], name="a", description="one")
    assert (first.created, first.replaced) == (True, False)
    assert (first.record.version, first.record.reference, first.record.status) == (1, "a@1", "ready")
    assert (first.record.matched, first.record.total, first.record.rank) == (8, 8, 2)
    assert first.record.target_modules == ["q_proj", "v_proj"]
    again = store.register(folders[0], name="a")
    assert (again.created, again.record) == (False, first.record)
    with open_adapter(store.path(first.record.digest)) as stored:
        assert stored.digest == first.record.digest == first.spec.digest


def test_other_weights_need_replace_and_become_the_next_version(
    store: AdapterStore, folders: list[Path]
) -> None:
    one = store.register(folders[0], name="a", pinned=True, description="kept").record
    assert "replace" in refused("adapter_exists", lambda: store.register(folders[1], name="a")).message
    two = store.register(folders[1], name="a", replace=True)
    assert (two.created, two.replaced, two.record.version) == (True, True, 2)
    assert (two.record.pinned, two.record.description, two.record.id) == (True, "kept", one.id)
    # An older version's weights come back as a new version, not as the old one.
    refused("adapter_exists", lambda: store.register(folders[0], name="a"))
    three = store.register(folders[0], name="a", replace=True)
    assert (three.created, three.record.version, three.record.digest) == (True, 3, one.digest)
    assert [record.version for record in store.versions("a")] == [1, 2, 3]
    assert [record.current for record in store.versions("a")] == [False, False, True]
    assert store.get("a@1").pinned is False


def test_replace_on_a_new_name_is_a_plain_registration(store: AdapterStore, folders: list[Path]) -> None:
    done = store.register(folders[0], name="a", replace=True)
    assert (done.created, done.replaced, done.record.version) == (True, False, 1)


def test_pin_and_description_given_with_the_same_weights_are_taken(
    store: AdapterStore, folders: list[Path]
) -> None:
    store.register(folders[0], name="a")
    done = store.register(folders[0], name="a", pinned=True, description="new")
    assert (done.created, done.record.pinned, done.record.description) == (False, True, "new")


def test_a_dry_run_checks_everything_and_changes_nothing(
    store: AdapterStore, folders: list[Path], tmp_path: Path
) -> None:
    done = store.register(folders[0], name="a", dry_run=True)
    assert (done.created, done.record.version, done.record.matched) == (False, None, 8)
    assert len(done.spec.deltas) == 4
    assert store.list() == []
    assert blob_files(tmp_path) == 0
    store.register(folders[0], name="a")
    assert store.register(folders[0], name="a", dry_run=True).record.version is None
    refused("adapter_exists", lambda: store.register(folders[1], name="a", dry_run=True))
    store.register(folders[1], name="a", dry_run=True, replace=True)
    assert [record.version for record in store.versions("a")] == [1]
    (folders[2] / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterInvalid):
        store.register(folders[2], name="b", dry_run=True)


def test_an_adapter_that_is_refused_leaves_nothing(
    store: AdapterStore, folders: list[Path], tmp_path: Path
) -> None:
    AdapterFolder(folders[0]).configure(r=3)
    with pytest.raises(AdapterInvalid):
        store.register(folders[0], name="a")
    refused("adapter_not_found", lambda: store.get("a"))
    assert blob_files(tmp_path) == 0


# ------------------------------------------------------------------ names and references


@pytest.mark.parametrize("name", ["a", "A", "0", "a.b-c_d", "x" * 128, "a..b", "CON"])
def test_names_of_the_grammar_are_taken(name: str, store: AdapterStore, folders: list[Path]) -> None:
    assert store.register(folders[0], name=name).record.name == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "a ",
        " a",
        ".a",
        "-a",
        "_a",
        "a/b",
        "a:b",
        "a@1",
        "a\n",
        "x" * 129,
        "\u00e9",
        "a\0",
        "../x",
        "%2e",
    ],
)
def test_names_outside_the_grammar_are_refused(name: str, store: AdapterStore, folders: list[Path]) -> None:
    assert refused("invalid_request", lambda: store.register(folders[0], name=name)).param == "name"
    refused("adapter_not_found", lambda: store.get(name))
    refused("model_not_found", lambda: store.resolve(name))


def test_an_adapter_may_not_be_named_as_the_base_and_names_are_compared_byte_for_byte(
    store: AdapterStore, folders: list[Path]
) -> None:
    refused("adapter_exists", lambda: store.register(folders[0], name="tiny"))
    refused("adapter_exists", lambda: store.register(folders[0], name="tiny", replace=True, dry_run=True))
    for number, name in enumerate(["Tiny", "TINY", "tiny.", "tinY"]):
        store.register(folders[number % 3], name=name)
    assert [record.name for record in store.list()] == ["TINY", "Tiny", "tinY", "tiny."]
    refused("adapter_not_found", lambda: store.get("tINY"))


def test_a_version_is_found_by_number_and_by_digest(store: AdapterStore, folders: list[Path]) -> None:
    records = [store.register(folder, name="a", replace=True).record for folder in folders]
    for record in records:
        digits = record.digest.removeprefix("sha256:")
        for ref in (f"a@{record.version}", f"a@{digits[:12]}", f"a@{digits}", f"a@sha256:{digits[:20]}"):
            assert store.get(ref).version == record.version
            assert store.resolve(ref).version == record.version
        for ref in (f"a@{digits[:11]}", f"a@{digits[:12]}0" if digits[12] != "0" else f"a@{digits[:12]}1"):
            refused("adapter_not_found", lambda ref=ref: store.get(ref))
    assert store.get("a").version == 3
    for ref in ("a@4", "a@0", "a@", "a@-1", "a@1.0", "a@01", "a@latest", "a@1@1", "b@1", "a@ 1"):
        refused("adapter_not_found", lambda ref=ref: store.get(ref))
        refused("model_not_found", lambda ref=ref: store.resolve(ref))


def test_a_digest_under_several_numbers_means_the_newest(store: AdapterStore, folders: list[Path]) -> None:
    for folder in (folders[0], folders[1], folders[0]):
        last = store.register(folder, name="a", replace=True).record
    assert store.get(f"a@{last.digest[7:25]}").version == 3


def test_an_ambiguous_digest_prefix_is_refused(store: AdapterStore, folders: list[Path]) -> None:
    for folder in folders[:2]:
        store.register(folder, name="a", replace=True)

    def collide(session: sa.orm.Session) -> None:
        session.execute(sa.text("update versions set digest = 'sha256:abcdefabcdef' || number"))

    store._database.write(collide)
    refused("adapter_not_found", lambda: store.get("a@abcdefabcdef"))
    assert store.get("a@abcdefabcdef1").version == 1


# ------------------------------------------------------------------ patch and removal


def test_an_older_version_becomes_current_again(store: AdapterStore, folders: list[Path]) -> None:
    for folder in folders:
        store.register(folder, name="a", replace=True)
    patched = store.patch("a", version=1, pinned=True, description="back")
    assert (patched.version, patched.pinned, patched.description) == (1, True, "back")
    assert store.get("a").version == 1
    refused("adapter_not_found", lambda: store.patch("a", version=9, pinned=False))
    assert store.get("a").pinned is True
    # The next registration counts on from the highest number ever given.
    assert store.register(folders[2], name="a", replace=True).record.version == 4


def test_removing_the_current_version_makes_the_highest_left_current(
    store: AdapterStore, folders: list[Path]
) -> None:
    for folder in folders:
        store.register(folder, name="a", replace=True)
    store.patch("a", version=1)
    removal = store.remove("a@1")
    assert [record.version for record in removal.removed] == [1]
    assert removal.current is not None
    assert removal.current.version == 3
    assert removal.unreferenced == [removal.removed[0].digest]
    removal = store.remove("a@2")
    assert removal.current is not None
    assert removal.current.version == 3
    removal = store.remove("a@3")
    assert removal.current is None
    refused("adapter_not_found", lambda: store.get("a"))
    refused("adapter_not_found", lambda: store.remove("a"))
    refused("adapter_not_found", lambda: store.versions("a"))


def test_version_numbers_are_never_given_twice_also_after_the_name_was_removed(
    store: AdapterStore, folders: list[Path]
) -> None:
    store.register(folders[0], name="a")
    store.register(folders[1], name="a", replace=True)
    store.remove("a@2")
    assert store.register(folders[2], name="a", replace=True).record.version == 3
    store.patch("a", pinned=True, description="of the first")
    first = store.get("a")
    store.remove("a")
    again = store.register(folders[0], name="a")
    assert (again.record.version, again.created, again.replaced) == (4, True, False)
    assert again.record.id != first.id
    assert (again.record.pinned, again.record.description) == (False, None)
    assert [record.version for record in store.versions("a")] == [4]
    refused("model_not_found", lambda: store.resolve("a@1"))


def test_removal_of_unknown_names_and_versions_is_refused(store: AdapterStore, folders: list[Path]) -> None:
    store.register(folders[0], name="a")
    for ref in ("b", "a@2", "a@x", "", "a@ffffffffffff"):
        refused("adapter_not_found", lambda ref=ref: store.remove(ref))
    assert store.get("a").version == 1


def test_one_weight_file_under_two_names_lives_as_long_as_either(
    store: AdapterStore, folders: list[Path], tmp_path: Path
) -> None:
    digest = store.register(folders[0], name="a").record.digest
    assert store.register(folders[0], name="b").record.digest == digest
    assert blob_files(tmp_path) == 1
    assert store.remove("a").unreferenced == []
    assert store.collect([digest]) == []
    store.path(digest)
    assert store.remove("b").unreferenced == [digest]
    store.path(digest)  # requests already admitted may still need it
    assert store.collect([digest, "sha256:" + "0" * 64]) == sorted([digest, "sha256:" + "0" * 64])
    with pytest.raises(AdapterCorrupt):
        store.path(digest)
    assert store.register(folders[0], name="c").created
    store.path(digest)
