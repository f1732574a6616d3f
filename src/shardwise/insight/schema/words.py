"""What users of other tools type: options and values, each with ours.

    ALIASES   options of others that mean one of ours
    FORMS     options of others, and former ones of ours, that ours say in another form
    VALUES    values of others that mean one of ours

An alias goes by the command: ``--max-seq-length`` is ``--seq-length`` wherever that is an option.
Underscores may stand for hyphens in any option.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

_OURS: Mapping[str, str] = {
    # Processes and hosts: torchrun, Accelerate, DeepSpeed.
    "nproc": "nproc-per-node num-processes num-gpus gpus num-proc devices",
    "nnodes": "num-nodes num-machines",
    "node-rank": "machine-rank",
    "rdzv": "rdzv-endpoint",
    # Model and data: transformers, Axolotl, torchtune.
    "from": "model-name-or-path base-model pretrained-model-name-or-path pretrained",
    "tokenizer": "tokenizer-name tokenizer-name-or-path",
    "data": "dataset datasets dataset-name dataset-path train-file train-data",
    "eval-data": "validation-file eval-dataset val-data",
    "data-dir": "train-dir",
    "seq-length": "seq-len sequence-length sequence-len max-seq-length max-seq-len max-length "
    "block-size context-length",
    "workers": "num-workers dataloader-num-workers",
    # Training.
    "lr": "learning-rate",
    "warmup": "warmup-steps num-warmup-steps lr-warmup-steps",
    "schedule": "lr-scheduler lr-scheduler-type lr-schedule",
    "optimizer": "optim",
    "beta1": "adam-beta1",
    "beta2": "adam-beta2",
    "clip-grad": "max-grad-norm clip-grad-norm grad-clip gradient-clipping",
    "batch-size": "per-device-train-batch-size per-device-batch-size micro-batch-size "
    "local-batch-size",
    "eval-batch-size": "per-device-eval-batch-size",
    "accumulate": "gradient-accumulation-steps grad-accum-steps accumulation-steps",
    "steps": "max-steps train-steps num-steps max-train-steps",
    "epochs": "num-train-epochs num-epochs max-epochs",
    # Sharding.
    "strategy": "sharding-strategy fsdp-sharding-strategy",
    "replicas": "data-parallel-replicate-degree dp-replicate",
    "param-dtype": "mixed-precision",
    "compile": "torch-compile",
    # Output.
    "max-tokens": "max-new-tokens",
    "out": "output-dir output output-path save-dir",
    "checkpoint-every": "save-steps checkpoint-interval checkpoint-steps",
    "keep-last": "save-total-limit",
    "eval-every": "eval-steps eval-interval",
    "log-every": "logging-steps log-interval",
    "log": "report-to",
    "overwrite": "overwrite-output-dir",
    "auto-resume": "auto-resume-from-checkpoints",
    "nested-fsdp": "use-nested-fsdp",
}

#: Options of others, without hyphens in front, and the option of ours that means the same.
ALIASES: Mapping[str, str] = {
    alias: ours for ours, aliases in _OURS.items() for alias in aliases.split()
}

#: Options that are none, and what to write instead.
FORMS: Mapping[str, str] = {
    "--gradient-checkpointing": "--activation-checkpointing full",
    "--use-gradient-checkpointing": "--activation-checkpointing full",
    "--selective-checkpointing": "--activation-checkpointing selective",
    "--operator-checkpointing": "--activation-checkpointing op",
    "--keep-activations": "--activation-checkpointing none",
    "--step-after-backward": "--no-step-in-backward",
    "--stepping": "--step-in-backward",
    "--existing": "--resume, --auto-resume or --overwrite",
    "--tensorboard": "--log tensorboard",
    "--no-tensorboard": "--log jsonl",
    "--use-tensorboard": "--log tensorboard",
    "--wandb-project": "--log wandb",
    "--bf16": "--param-dtype bf16",
    "--fp16": "--param-dtype bf16",
    "--dtype": "--param-dtype",
    "--torch-dtype": "--param-dtype",
    "--adapter": "--lora r=16,alpha=32",
    "--lora-r": "--lora r=16,alpha=32",
    "--lora-rank": "--lora r=16,alpha=32",
    "--lora-alpha": "--lora r=16,alpha=32",
    "--lora-dropout": "--lora r=16,dropout=0.05",
    "--lora-target-modules": "--lora r=16,targets=q_proj+v_proj",
    "--use-lora": "--lora r=16,alpha=32",
    "--use-peft": "--lora r=16,alpha=32",
    "--load-in-4bit": "--base nf4",
    "--load-in-8bit": "--base nf4",
    "--sample-packing": "--packing packed",
    "--chat-format": "--chat, which knows the formats",
    "--chat-template": "--chat, which takes that of the tokenizer",
    "--val-set-size": "--eval-data, or nothing: one part in 20 is held out",
    "--resume-from-checkpoint": "--resume, and --out with the folder of the run",
    "--save-strategy": "--checkpoint-every, in steps",
    "--eval-strategy": "--eval-every",
    "--evaluation-strategy": "--eval-every",
    "--logging-dir": "--out",
    "--do-train": "nothing: train trains",
    "--do-eval": "--eval-every",
    "--global-batch-size": "--batch-tokens, or --batch-size of a rank and --accumulate",
    "--warmup-ratio": "--warmup, in steps",
    "--cpu-offload": "--offload host",
    "--fsdp": "--strategy full",
    "--fsdp-config": "--strategy, and options of its own",
    "--data-parallel-shard-degree": "--strategy full, and --nproc",
    "--deepspeed": "--strategy full, zero2 or zero1",
    "--zero-stage": "--strategy full, zero2 or zero1",
    "--master-addr": "--rdzv HOST:PORT",
    "--master-port": "--rdzv HOST:PORT",
    "--main-process-ip": "--rdzv HOST:PORT",
    "--main-process-port": "--rdzv HOST:PORT",
    "--rdzv-backend": "--rdzv HOST:PORT of host 0, or torchrun --rdzv-backend ... -m shardwise",
    "--rdzv-id": "--rdzv HOST:PORT, with a port of its own for each job",
    "--rdzv-conf": "--rdzv-timeout SECONDS",
    "--standalone": "to leave it out (one host is the default)",
    "--multi-gpu": "--nproc gpu",
    # The rest of torchrun's.
    "--redirects": "--log-dir FOLDER, and --tee for what is shown",
    "--local-ranks-filter": "--tee 0:3, which shows rank 0 alone",
    "--start-method": "to leave it out (each rank is a program of its own)",
    "--monitor-interval": "to leave it out (ranks are watched all the time)",
    "--role": "to leave it out (all ranks have one role)",
    "--run-path": "the path of the script without an option",
    "--local-addr": "--rdzv HOST:PORT, an address of host 0",
    **dict.fromkeys(
        (
            *("--event-log-handler", "--logs-specs", "--numa-binding", "--signals-to-handle"),
            *("--duplicate-stdout-filters", "--duplicate-stderr-filters", "--shutdown-timeout"),
            *("--no-python", "--virtual-local-rank"),
        ),
        "torchrun, which has it, in place of shardwise run",
    ),
    "--nproc": "--mesh dp=N",
    "--replicas": "--mesh dp_replicate=R,dp_shard=S",
    "--steps": "--epochs",
    "--from": "the model without an option",
}

#: Values of others, and those of ours that mean the same where ours can be.
VALUES: Mapping[str, str] = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "zero2": "grad-op",
    "zero3": "full",
    "full-shard": "full",
    "shard-grad-op": "grad-op",
    "ddp": "no-shard",
    "hybrid-shard": "hybrid",
    "hybrid-shard-zero2": "hybrid-zero2",
    "operator": "op",
    "wsd": "warmup-stable-decay",
    "constant-with-warmup": "constant",
    "adamw-torch": "adamw",
    "adamw-torch-fused": "adamw",
    "adamw-8bit": "adamw8bit",
}


def own_option(name: str) -> str:
    """Return our name of an option, without its hyphens in front; any other name stays."""
    name = name.replace("_", "-")
    return ALIASES.get(name, name)


def own_word(text: str, choices: Collection[str]) -> str:
    """Return the choice that a text stands for; the text itself if it stands for none."""
    other = VALUES.get(text.lower().replace("_", "-"), text)
    return other if text not in choices and other in choices else text
