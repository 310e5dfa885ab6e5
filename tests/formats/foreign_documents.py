"""Documents in the formats of other tools: written for the tests with each format's fields, not copied."""

from __future__ import annotations

from typing import Any

RECORD: dict[str, Any] = {
    "_id": {"$oid": "65f0c0ffee0000000000abcd"},
    "owner": "akash1example",
    "created_at": {"$date": "2024-05-13T09:00:00.000Z"},
    "state": {
        "currentStep": 3,
        "deployments": [],
        "parallelForm": {
            "type": "pipeline",
            "modelName": "digits_1",
            "nnodes": 2,
            "nprocPerNode": {"$numberInt": "2"},
            "batchSize": 64,
            "epochs": 3,
            "learningRate": 0.01,
            "akashOnly": True,
        },
        "nodesForm": {
            "nodes": [
                {"protocol": "https", "ip": "first.example.com", "gpu": False, "agentPort": 80},
                {"protocol": "http", "ip": "10.0.0.2", "gpu": True, "agentPort": 5000},
            ],
            "masterNode": {"address": "10.0.0.1", "port": 9999},
            "rendezvousBackend": {"id": 101, "backend": "c10d", "hostIP": "localhost", "port": 9999},
        },
        "trainingScriptForm": {
            "repo": "https://github.com/you/digits",
            "isPrivate": True,
            "username": "you",
            "password": "hunter2",
            "toFolder": "digits",
            "isClone": True,
            "filePath": "ppl/nn/main.py",
        },
    },
}
TENSOR_STATE: dict[str, Any] = {
    "parallelForm": {"type": "tensor", "modelName": "my model", "nnodes": 1, "nprocPerNode": 4, "epochs": 1},
    "nodesForm": {
        "nodes": [{"ip": "10.0.0.1", "gpu": True}],
        "masterNode": {"address": "10.0.0.9", "port": 1},
        "rendezvousBackend": {"id": 7, "backend": "c10d", "hostIP": "10.0.0.1", "port": 29400},
    },
    "trainingScriptForm": {"repo": "https://github.com/you/digits", "isPrivate": False, "filePath": "main.py"},
}

SDL: dict[str, Any] = {
    "version": "2.0",
    "services": {
        "first": {
            "image": "ghcr.io/you/agent:1",
            "expose": [{"port": 5000, "as": 80, "to": [{"global": True}]}],
            "command": ["bash", "-c"],
            "args": ["serve --port 5000; sleep infinity"],
            "env": ["MODE=agent"],
        },
        "others": {
            "image": "ghcr.io/you/agent:2",
            "expose": [{"port": 5000, "as": 80, "proto": "tcp", "to": [{"global": True}, {"service": "first"}]}],
            "params": {"storage": {"shm": {"mount": "/dev/shm"}}},
        },
    },
    "profiles": {
        "compute": {
            "small": {
                "resources": {
                    "cpu": {"units": 2},
                    "memory": {"size": "4Gi"},
                    "storage": [{"size": "20Gi"}, {"name": "shm", "size": "1Gi", "attributes": {"class": "ram"}}],
                }
            },
            "large": {
                "resources": {
                    "cpu": {"units": "500m"},
                    "memory": {"size": "2GB"},
                    "storage": {"size": "20GB"},
                    "gpu": {"units": 2, "attributes": {"vendor": {"nvidia": [{"model": "a100"}]}}},
                }
            },
        },
        "placement": {
            "anywhere": {
                "signedBy": {"anyOf": ["akash1example"]},
                "pricing": {"small": {"denom": "uact", "amount": 10}, "large": {"denom": "uact", "amount": 1000}},
            }
        },
    },
    "deployment": {
        "first": {"anywhere": {"profile": "small", "count": 1}},
        "others": {"anywhere": {"profile": "large", "count": 2}},
    },
}
_TRAIN = (
    "torchrun --nnodes=2 --nproc-per-node=2 --node-rank={} --master-addr=first --master-port=29501 train.py --lr $$3"
)
SDL_WITH_TORCHRUN: dict[str, Any] = {
    "version": "2.0",
    "services": {
        "first": {
            "image": "ghcr.io/you/train:1",
            "env": ["MODE=fast", "SSH_PUBKEY=", "HF_TOKEN=hf_secret", "PASSPORT=", "RANK=0", "WORLD_SIZE=", "OWN=1"],
            "command": ["bash", "-c"],
            "args": ["nvidia-smi; " + _TRAIN.format(0)],
            "expose": [{"port": 2222, "as": 2222, "to": [{"global": True}, {"service": "second"}]}],
        },
        "second": {
            "image": "ghcr.io/you/train:1",
            "env": ["MODE=fast", "SSH_PUBKEY=", "HF_TOKEN=hf_secret", "PASSPORT=", "RANK=0", "WORLD_SIZE=", "OWN=2"],
            "command": ["bash", "-c"],
            "args": ["nvidia-smi; " + _TRAIN.format(1)],
        },
        "board": {"image": "tensorboard:2", "command": ["tensorboard"]},
    },
    "profiles": {
        "compute": {
            "node": {"resources": {"cpu": {"units": 8}, "memory": {"size": "64Gi"}, "gpu": {"units": 2}}},
            "board": {"resources": {"cpu": {"units": 1}, "memory": {"size": "1Gi"}}},
        },
        "placement": {"anywhere": {"pricing": {"node": {"denom": "uact", "amount": 1000}}}},
    },
    "deployment": {
        "first": {"anywhere": {"profile": "node", "count": 1}},
        "second": {"anywhere": {"profile": "node", "count": 1}},
        "board": {"anywhere": {"profile": "board", "count": 1}},
    },
}

RFC: dict[str, Any] = {
    "job_id": "0c9d3f6e-1111-4222-8333-444455556666",
    "driver": "torch_distributed",
    "model": "s3://models/lenet",
    "data": {"location": "s3://data/digits", "chunk": ["00000", "00001"]},
    "training_definition": {
        "loss_fn": "cross_entropy",
        "local_steps": 500,
        "optimizer": "AdamW",
        "lr_scheduler": "cosine",
        "accelerate_config": {"mixed_precision": "bf16", "num_processes": 2},
        "batch": 32,
    },
}
RFC_AS_WRITTEN = """{
  job_id : <JOB_ID>,
  driver: "torch_distributed",
  model: <MODEL_PATH>,
  data: { location : "s3://data/digits", chunk : [<IDENTIFIER>, ...]}
  training_definition : {
    loss_fn: cross_entropy,
    local_steps: <LOCAL_ROUNDS>,
    optimizer: <OPTIMIZER>,
    accelerate_config: ...,
    ...
  }
}
"""
SCHEDULER: dict[str, Any] = {
    "cert_pem": "scheduler.pem",
    "gateway_addresses": ["/ip4/127.0.0.1/tcp/8080"],
    "relay_circuit": True,
    "scheduler": {
        "status_bridge": "127.0.0.1:61000",
        "job": {
            "type": "diloco",
            "model": {
                "repository": "you/lenet",
                "revision": "main",
                "filenames": ["config.json", "model.safetensors"],
                "token": "hf_secret",
                "type": "image-classification",
                "input_names": ["pixel_values"],
            },
            "preprocessor": {"repository": "you/lenet", "input_names": ["images"]},
            "dataset": {"dataset": "digits"},
            "rounds": {"avg_samples_between_updates": 1200, "update_rounds": 100, "max_batch_size": 300},
            "inner_optimizer": {"learning-rate": 0.002, "betas": [0.9, 0.99], "epsilon": 1e-9},
            "outer_optimizer": {"learning-rate": 0.7, "momentum": 0.9},
            "resources": {
                "num_workers": 2,
                "worker": {"gpu": 10.0, "cpu": 1.0},
                "parameter_server": {"cpu": 1.0},
                "worker_price": {"bid": 100.0, "max": 110.0},
            },
        },
    },
}
SCHEDULER_OF_DOCS: dict[str, Any] = {
    "scheduler": {
        "job": {
            "dataset_name": "digits",
            "model": {"repository": "you/lenet", "type": "vision-classification"},
            "inner_optimizer": {
                "learning_rate": 0.002,
                "schedule": "cosine-with-warmup",
                "warmup_steps": 20,
                "total_steps": 500,
            },
            "outer_optimizer": {"learning_rate": 0.7},
            "resources": {"num_workers": 4, "worker": [{"type": "GPU", "min": 10.0}, {"kind": "diloco-transformer"}]},
        }
    }
}

TITAN_2024: dict[str, Any] = {
    "job": {"dump_folder": "./out", "description": "Llama 3 8B"},
    "profiling": {"enable_profiling": True, "save_traces_folder": "traces", "profile_freq": 100},
    "metrics": {"log_freq": 5, "enable_tensorboard": True},
    "model": {"name": "llama3", "flavor": "8B", "norm_type": "rmsnorm", "tokenizer_path": "./tokenizer.model"},
    "optimizer": {"name": "AdamW", "lr": 3e-4},
    "training": {
        "batch_size": 2,
        "seq_len": 4096,
        "warmup_steps": 200,
        "max_norm": 0.5,
        "steps": 1000,
        "data_parallel_degree": 4,
        "tensor_parallel_degree": 2,
        "enable_fp8_linear": False,
        "compile": True,
        "dataset": "c4",
    },
    "experimental": {"pipeline_parallel_degree": 2},
    "checkpoint": {"enable_checkpoint": True, "folder": "kept", "interval_type": "steps", "interval": 50},
    "activation_checkpoint": {"mode": "full", "selective_ac_option": "op"},
}
TITAN_2025: dict[str, Any] = {
    "job": {"dump_folder": "./out", "print_args": True, "use_for_integration_test": True},
    "metrics": {"log_freq": 1, "enable_wandb": False},
    "model": {"name": "llama3", "flavor": "debugmodel"},
    "optimizer": {"name": "SGD", "lr": 8e-4},
    "training": {
        "batch_size": 8,
        "seq_len": 2048,
        "warmup_steps": 2,
        "steps": 10,
        "data_parallel_replicate_degree": 2,
        "data_parallel_shard_degree": -1,
        "fsdp_reshard_after_forward": "never",
        "tensor_parallel_degree": 1,
        "compile": False,
        "dataset": "c4_test",
        "seed": 3,
    },
    "experimental": {
        "context_parallel_degree": 1,
        "pipeline_parallel_degree": 1,
        "enable_async_tensor_parallel": False,
    },
    "checkpoint": {"enable_checkpoint": False, "model_weights_only": False},
    "float8": {"enable_fsdp_float8_all_gather": True},
}
TITAN_LAST: dict[str, Any] = {
    "job": {"dump_folder": "./out", "description": "Llama 3 8B", "print_config": False},
    "model": {"name": "llama3", "flavor": "8B", "hf_assets_path": "./assets", "converters": ["quantize.linear.float8"]},
    "optimizer": {"name": "AdamW", "lr": 3e-4, "eps": 1e-8},
    "lr_scheduler": {"warmup_steps": 20, "decay_ratio": 0.8, "decay_type": "cosine", "min_lr_factor": 0.1},
    "training": {
        "local_batch_size": 4,
        "global_batch_size": 64,
        "seq_len": 8192,
        "max_norm": 1.0,
        "steps": 100,
        "dataset": "c4",
        "mixed_precision_param": "float32",
    },
    "parallelism": {
        "data_parallel_shard_degree": 2,
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "interleaved1f1b",
        "pipeline_parallel_microbatch_size": 2,
        "context_parallel_degree": 1,
    },
    "checkpoint": {
        "enable": True,
        "interval": 10,
        "keep_latest_k": 0,
        "async_mode": "async",
        "last_save_model_only": True,
    },
    "activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"},
    "compile": {"enable": True, "components": ["model", "loss"]},
    "quantize": {"linear": {"float8": {"filter_fqns": ["output", "router"]}}},
    "debug": {"seed": 7},
    "validation": {"enable": True, "dataset": "c4_validation", "freq": 25, "steps": 10},
    "experimental": {"no_such_key": 3},
    "no_such_section": {"key": "value"},
}

LEASE: dict[str, Any] = {
    "services": {
        "first": {
            "name": "first",
            "available": 1,
            "total": 1,
            "uris": ["first.example.org"],
            "observed_generation": 1,
            "replicas": 1,
            "updated_replicas": 1,
            "ready_replicas": 1,
            "available_replicas": 1,
        },
        "second": {"name": "second", "available": 1, "total": 1},
    },
    "forwarded_ports": {
        "first": [{"host": "b.example.org", "port": 2222, "externalPort": 31022, "proto": "TCP", "name": "first"}],
        "second": [{"host": "b.example.org", "port": 2222, "externalPort": 31023}, {"port": 80, "externalPort": 31080}],
    },
    "ips": {"first": [{"IP": "10.0.0.1", "Port": 2222, "ExternalPort": 22, "Protocol": "TCP"}, {"Port": 80}]},
}
RAVNEST: dict[str, Any] = {
    "0": {"IP": "10.0.0.1:8080", "benchmarks": {"ram": 8, "bandwidth": 20, "speed": 3}, "address": "somewhere"},
    "1": {"IP": "10.0.0.2:8081", "benchmarks": {"ram": 16, "bandwidth": 10}},
    "2": {"IP": "10.0.0.2"},
}
RAVNEST_NODE: dict[str, Any] = {
    "node_id": 0,
    "local_host": "10.0.0.1",
    "local_port": 18080,
    "template_path": "trainer/nodes",
    "rank": 0,
    "ring_size": 1,
    "param_addresses": {"0": {"0": "10.0.0.2:8081"}},
    "ring_ids": {"0": "a"},
    "node_type": "root",
}
ACCELERATE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "FSDP",
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "fsdp_config": {
        "fsdp_activation_checkpointing": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_offload_params": False,
        "fsdp_sharding_strategy": "FULL_SHARD",
        "fsdp_version": 2,
    },
    "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default"},
    "parallelism_config": {"parallelism_config_dp_shard_size": 2, "parallelism_config_tp_size": 2},
    "gpu_ids": "0,1",
    "machine_rank": 1,
    "main_process_ip": "10.0.0.1",
    "main_process_port": 29500,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 2,
    "num_processes": 4,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_use_cluster": False,
    "use_cpu": False,
}
MEGATRON: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MEGATRON_LM",
    "megatron_lm_config": {
        "megatron_lm_pp_degree": 2,
        "megatron_lm_tp_degree": 2,
        "megatron_lm_num_micro_batches": 4,
        "megatron_lm_gradient_clipping": 1.0,
        "megatron_lm_sequence_parallelism": True,
    },
    "mixed_precision": "fp16",
    "gpu_ids": "all",
    "num_machines": 1,
    "num_processes": 8,
}

# By file name; the suffix gives the format.
DOCUMENTS: dict[str, dict[str, Any]] = {
    "record.json": RECORD,
    "state.json": TENSOR_STATE,
    "agents.yaml": SDL,
    "train.yaml": SDL_WITH_TORCHRUN,
    "job.json": RFC,
    "scheduler.toml": SCHEDULER,
    "scheduler-docs.toml": SCHEDULER_OF_DOCS,
    "llama3_8b_2024.toml": TITAN_2024,
    "debug_2025.toml": TITAN_2025,
    "llama3_8b.toml": TITAN_LAST,
    "lease.json": LEASE,
    "node_configs.json": RAVNEST,
    "node_0.json": RAVNEST_NODE,
    "fsdp.yaml": ACCELERATE,
    "megatron.yaml": MEGATRON,
}
