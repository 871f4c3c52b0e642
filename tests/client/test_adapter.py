"""A job that trains an adapter delivers the files of peft, without the frozen weights."""

from __future__ import annotations

from pathlib import Path

import torch
from job_server import JobServer, in_background
from lora_cases import base_model, libraries, lora_model, sentences
from torch import nn

import ravnest


def test_fetch_writes_the_adapter_and_on_request_the_whole_model(
    shared_server: JobServer, tmp_path: Path
) -> None:
    _, peft = libraries()
    model = lora_model()
    data = sentences(16)
    example = {name: torch.stack([each[name] for each in data[:4]]) for name in data[0]}
    del example["labels"]
    job = ravnest.Job(
        model=model, example_kwargs=example, train_data=data, criterion=nn.CrossEntropyLoss()
    )
    token = shared_server.token()
    with (
        shared_server.provider() as provider,
        ravnest.submit(job, server=shared_server.url, token=token) as handle,
    ):

        def train() -> None:
            provider.take_assignment()
            provider.report("training")
            provider.save_checkpoint(1, change=0.0)
            provider.finish(changed_only=True)

        with in_background(train):
            path = handle.fetch(tmp_path / "adapter", timeout=60)
        result = handle.result(into=lora_model(), timeout=60)
        whole = handle.result(whole=True, timeout=60)
        partial = handle.partial(into=lora_model(), folder=tmp_path / "partial")
        partial_whole = handle.partial(whole=True)
    assert sorted(each.name for each in path.parent.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    loaded = peft.PeftModel.from_pretrained(base_model(), path.parent).eval()
    with torch.no_grad():
        assert torch.equal(loaded(**example).logits, model.eval()(**example).logits)
    assert set(result) == set(peft.get_peft_model_state_dict(model, save_embedding_layers=False))
    assert partial.path.name == "adapter_model.safetensors"
    assert all(torch.equal(partial.state_dict[name], tensor) for name, tensor in result.items())
    assert list(partial_whole.state_dict) == list(whole) == list(model.state_dict())
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in whole.items())
