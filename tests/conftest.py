"""Small models and games that the tests share."""

import os

# The tests' models are too small for a second thread to help, and their processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from file_order import LONGEST
from hypothesis import settings
from tiny_models import tiny_model

from workbench import shipped
from workbench.policy import Policy
from workbench.warmstart import build_tokenizer

settings.register_profile("shared cores", deadline=None)  # how long an example takes says nothing there
settings.load_profile("shared cores")

SENTENCES = "take the red cup put it on table look around you see a . , : [ ] privileged skill information go"


def pytest_collection_modifyitems(items):
    place = {name: n for n, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONGEST)))


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer(sorted(set(SENTENCES.split())))


@pytest.fixture
def policy(tokenizer):
    return Policy(tiny_model(tokenizer), tokenizer)


@pytest.fixture(scope="session")
def small_model_folder():
    return shipped.data("models", "twc-small")


@pytest.fixture
def in_process(monkeypatch):
    """Notebooks of this test run in its process: all of a run but a kernel of its own, seconds less each."""
    import notebook_engine
    import papermill

    monkeypatch.setattr(papermill, "execute_notebook", notebook_engine.execute_notebook)
