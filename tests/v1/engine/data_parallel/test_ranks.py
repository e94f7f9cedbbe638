"""What each of several cores runs."""

from vllm.config import KVTransferConfig, ParallelConfig, VllmConfig
from vllm.config.kv_transfer import child_configs
from vllm.v1.engine.data_parallel.ranks import make_rank_config


def test_each_start_of_a_core_holds_prompts_of_its_own() -> None:
    raw = {"kv_connector": "TcpConnector", "kv_role": "kv_both", "engine_id": "p"}
    config = VllmConfig(
        parallel_config=ParallelConfig(data_parallel_size=2),
        kv_transfer_config=KVTransferConfig.from_dict(raw),
    )
    made = [make_rank_config(config, rank).kv_transfer_config for rank in (0, 1, 1)]
    transfers = [transfer for transfer in made if transfer is not None]
    assert [transfer.engine_id for transfer in transfers] == ["p-dp0", "p-dp1", "p-dp1"]
    # A core that was started again knows nothing of what the one before it held.
    assert len({transfer.instance_id for transfer in transfers}) == 3
    assert make_rank_config(VllmConfig(), 0).kv_transfer_config is None


def test_cores_with_tiers_share_their_caches_beside_them() -> None:
    tiers = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"cpu_bytes_to_use": "64MiB"},
    }
    config = VllmConfig(
        parallel_config=ParallelConfig(
            data_parallel_size=2, data_parallel_fault_tolerance=True, warm_pull_bytes=1 << 20
        ),
        kv_transfer_config=KVTransferConfig.from_dict(tiers),
    )
    made = [make_rank_config(config, rank).kv_transfer_config for rank in (0, 1)]
    children = []
    for transfer in made:
        assert transfer is not None
        assert transfer.has_tiers
        assert transfer.kv_load_failure_policy == "fail"
        children.append(child_configs(transfer))
    for near, sharing in children:
        assert (near.kv_connector, sharing.kv_connector) == (
            "OffloadingConnector",
            "NeighbourConnector",
        )
        assert near.kv_connector_extra_config == {"cpu_bytes_to_use": "64MiB"}
    names = {child.engine_id for pair in children for child in pair}
    assert len(names) == 2


def test_cores_that_hand_prompts_over_share_their_caches_besides() -> None:
    taking = {"kv_connector": "TcpConnector", "kv_role": "kv_consumer", "kv_port": 2345}
    tiers = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    joined = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_consumer",
        "engine_id": "d",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"connectors": [taking, tiers]},
    }
    parallel = ParallelConfig(
        data_parallel_size=2, data_parallel_fault_tolerance=True, warm_pull_bytes=1 << 20
    )
    for raw, expected in (
        (taking, ["NeighbourConnector", "TcpConnector"]),
        (joined, ["OffloadingConnector", "NeighbourConnector", "TcpConnector"]),
    ):
        asked = KVTransferConfig.from_dict(raw)
        config = VllmConfig(parallel_config=parallel, kv_transfer_config=asked)
        transfer = make_rank_config(config, 1).kv_transfer_config
        assert transfer is not None
        assert transfer.kv_load_failure_policy == asked.kv_load_failure_policy
        assert transfer.engine_id == f"{asked.engine_id}-dp1"
        parts = child_configs(transfer)
        # Tiers are nearest, and what loads for nobody hears before others of what came.
        assert [part.kv_connector for part in parts] == expected
        assert (parts[-1].kv_role, parts[-1].kv_port) == ("kv_consumer", 2345)
        assert parts[-2].kv_connector_extra_config["leaves_requests"]
