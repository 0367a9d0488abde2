"""What launchers really set: recorded, or taken from the source or documentation that is named.

Each function returns the environment of one rank, without what has nothing to do with ranks.
"""

from __future__ import annotations

Environ = dict[str, str]


def torchrun(rank: int = 3, nodes: int = 2, each: int = 2) -> Environ:
    """Recorded: torch 2.13, ``torchrun --nnodes 2 --nproc-per-node 2``."""
    node, local = divmod(rank, each)
    return {
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(each),
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": "40385",
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(nodes * each),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "757272a5-34d4-4bcd-926d-1f521a5b14cc",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "WORLD_SIZE": str(nodes * each),
    }


def srun(rank: int = 3) -> Environ:
    """Recorded: Slurm 22.05, ``srun -N2 -n4 --ntasks-per-node=2``."""
    node, local = divmod(rank, 2)
    return {
        "SLURMD_NODENAME": f"n{node + 1}",
        "SLURM_CPUS_ON_NODE": "2",
        "SLURM_GTIDS": f"{2 * node},{2 * node + 1}",
        "SLURM_JOBID": "1",
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NAME": "python",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "SLURM_LOCALID": str(local),
        "SLURM_NNODES": "2",
        "SLURM_NODEID": str(node),
        "SLURM_NODELIST": "n[1-2]",
        "SLURM_NPROCS": "4",
        "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_SRUN_COMM_HOST": "127.0.0.1",
        "SLURM_STEPID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_TASKS_PER_NODE": "2(x2)",
        "SLURM_TASK_PID": "6772",
    }


def srun_in_salloc(rank: int = 3) -> Environ:
    """Recorded: ``salloc -N2 -n4 srun python train.py``; the job is called interactive."""
    environ = srun(rank) | {"SLURM_JOB_NAME": "interactive", "SLURM_DISTRIBUTION": "block"}
    del environ["SLURM_NTASKS_PER_NODE"]
    return environ


def salloc() -> Environ:
    """Recorded: the shell of ``salloc -N2 -n4``."""
    return {
        "SLURM_JOBID": "3",
        "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
        "SLURM_JOB_ID": "3",
        "SLURM_JOB_NAME": "interactive",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NNODES": "2",
        "SLURM_NODELIST": "n[1-2]",
        "SLURM_NPROCS": "4",
        "SLURM_NTASKS": "4",
        "SLURM_TASKS_PER_NODE": "2(x2)",
    }


def batch_script() -> Environ:
    """Recorded: the script of ``sbatch -N2 -n4``, outside any srun."""
    return salloc() | {
        "SLURMD_NODENAME": "n1",
        "SLURM_GTIDS": "0",
        "SLURM_JOB_NAME": "b.sh",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_TASK_PID": "6903",
    }


def pty_shell() -> Environ:
    """Recorded: ``srun --pty bash``, a step of one task."""
    return {
        "SLURMD_NODENAME": "n1",
        "SLURM_JOB_ID": "5",
        "SLURM_JOB_NAME": "bash",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "SLURM_LOCALID": "0",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "n1",
        "SLURM_NPROCS": "1",
        "SLURM_NTASKS": "1",
        "SLURM_PROCID": "0",
        "SLURM_PTY_PORT": "38729",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        "SLURM_TASKS_PER_NODE": "1",
    }


def mpirun(rank: int = 1, size: int = 2, local_size: int = 2) -> Environ:
    """Recorded: Open MPI 4.1, ``mpirun -n 2``; on several nodes by their documentation."""
    return {
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % local_size),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "OMPI_COMM_WORLD_NODE_RANK": str(rank % local_size),
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_MCA_ess_base_jobid": "1909784577",
        "OMPI_MCA_orte_num_nodes": str(size // local_size),
        "OMPI_UNIVERSE_SIZE": str(size),
        "PMIX_NAMESPACE": "1909784577",
        "PMIX_RANK": str(rank),
    }


def hydra(rank: int = 1) -> Environ:
    """Recorded: MPICH 4.0, ``mpiexec.hydra -n 2``."""
    return {
        "HYDI_CONTROL_FD": "7",
        "MPI_LOCALNRANKS": "2",
        "MPI_LOCALRANKID": str(rank),
        "PMI_FD": "8",
        "PMI_RANK": str(rank),
        "PMI_SIZE": "2",
    }


def intel_mpi(rank: int = 3) -> Environ:
    """``mpirun -n 4 -ppn 2`` on two nodes, with an address given.

    Its launcher is a Hydra, as MPICH's, and sets the same for each rank:
    pmodels/mpich:src/pm/hydra/proxy/pmip_cb.c; under Intel's they are read by, for one,
    facebookresearch/param:et_replay/comm/comms_utils.py. What it adds says nothing of ranks:
    https://www.intel.com/content/www/us/en/docs/mpi-library/developer-reference-linux/2021-16/command-reference.html
    """
    return {
        "I_MPI_HYDRA_TOPOLIB": "hwloc",
        "I_MPI_MPIRUN": "mpirun",
        "MASTER_ADDR": "n1",
        "MPI_LOCALNRANKS": "2",
        "MPI_LOCALRANKID": str(rank % 2),
        "PMI_RANK": str(rank),
        "PMI_SIZE": "4",
    }


def _cray(rank: int, size: int, each: int, job: str) -> Environ:
    """What Cray's PMI reads: SchedMD/slurm:src/plugins/mpi/cray_shasta/mpi_cray_shasta.c."""
    node, local = divmod(rank, each)
    return {
        "PALS_APID": job,
        "PALS_APINFO": "/var/spool/apinfo",
        "PALS_LOCAL_RANKID": str(local),
        "PALS_NODEID": str(node),
        "PALS_RANKID": str(rank),
        "PALS_SPOOL_DIR": "/var/spool",
        "PMI_CONTROL_PORT": "20032",
        "PMI_LOCAL_RANK": str(local),
        "PMI_LOCAL_SIZE": str(each),
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "PMI_UNIVERSE_SIZE": str(size),
    }


def pals(rank: int = 5) -> Environ:
    """Six ranks on three nodes by PALS's ``mpiexec``, with an address given.

    It sets what Cray's PMI reads, as in :func:`_cray`, and a local size of its own:
    argonne-lcf/user-guides:docs/polaris/running-jobs/using-gpus.md (PMI_LOCAL_RANK),
    meta-pytorch/torchcomms:comms/torchcomms/TorchCommUtils.cpp (PALS_LOCAL_SIZE)
    """
    of_pals = {"PALS_LOCAL_SIZE": "2", "PALS_DEPTH": "1", "MASTER_ADDR": "x1000c0s0b0n0"}
    return _cray(rank, 6, 2, "5f5c1f0e-6a2e-4a36-9b7a-6a7f5f3a2f10") | of_pals


def pals_with_pmix(rank: int = 5) -> Environ:
    """The same with ``--pmi=pmix``: no variable tells the size.

    meta-pytorch/torchcomms:comms/torchcomms/TorchCommUtils.cpp has to count hosts; the option:
    https://docs.open-mpi.org/en/v6.0.x-pre-release/launching-apps/pals.html
    """
    environ = {name: value for name, value in pals(rank).items() if not name.startswith("PMI_")}
    return environ | {"PALS_PMI": "pmix", "PMIX_RANK": str(rank)}


def srun_on_cray(rank: int = 3) -> Environ:
    """``srun`` with ``--mpi=cray_shasta``, the usual one on these machines: see :func:`_cray`."""
    return srun(rank) | _cray(rank, 4, 2, "1.0") | {"PMI_JOBID": "1"}


def flux_on_cray(rank: int = 1) -> Environ:
    """``flux run -o pmi=cray-pals -N2 -n2``, which tells neither size nor local rank.

    flux-framework/flux-coral2:doc/man1/flux-shell-cray-pals.rst
    """
    return {
        "PALS_APID": "8762756694016",
        "PALS_NODEID": str(rank),
        "PALS_RANKID": str(rank),
        "PMI_CONTROL_PORT": "11998,11999",
    }


def kubeflow_of_old(rank: int = 1) -> Environ:
    """A PyTorchJob of operators before those that set ``PET_`` variables: two pods.

    kubeflow/training-operator:pkg/controller.v1/pytorch/envvar.go at 5fa872ff10ed, and master.go
    """
    return {
        "MASTER_ADDR": "job-master-0",
        "MASTER_PORT": "23456",
        "PYTHONUNBUFFERED": "0",
        "RANK": str(rank),
        "WORLD_SIZE": "2",
    }


def kubeflow(pod: int = 1, nproc: str = "auto") -> Environ:
    """A PyTorchJob of two pods; ``auto`` is what ``nprocPerNode`` is unless it is written.

    RANK is the pod's, WORLD_SIZE counts processes: pods times ``nprocPerNode`` if that is a
    number, else pods. kubeflow/training-operator:pkg/controller.v1/pytorch/envvar.go (setPodEnv,
    getNprocPerNodeInt) and master.go, pkg/apis/kubeflow.org/v1/pytorch_defaults.go
    """
    return kubeflow_of_old(pod) | {
        "PET_MASTER_ADDR": "job-master-0",
        "PET_MASTER_PORT": "23456",
        "PET_NNODES": "2",
        "PET_NODE_RANK": str(pod),
        "PET_NPROC_PER_NODE": nproc,
        "PYTHONUNBUFFERED": "1",
        "WORLD_SIZE": str(2 * int(nproc)) if nproc.isdecimal() else "2",
    }


def kubeflow_elastic() -> Environ:
    """A PyTorchJob with an ``elasticPolicy`` and workers only: torchrun counts and numbers pods.

    kubeflow/training-operator:pkg/controller.v1/pytorch/elastic.go
    """
    return {
        "PET_MAX_RESTARTS": "3",
        "PET_NNODES": "1:3",
        "PET_NPROC_PER_NODE": "auto",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "job-worker-0:23456",
        "PYTHONUNBUFFERED": "1",
    }


def kubeflow_trainer(pod: int = 1) -> Environ:
    """A TrainJob of Kubeflow's Trainer, the operator's successor: no RANK.

    kubeflow/trainer:pkg/runtime/framework/plugins/torch/torch.go
    """
    return {
        "PET_MASTER_ADDR": "job-node-0-0.job",
        "PET_MASTER_PORT": "29400",
        "PET_NNODES": "2",
        "PET_NODE_RANK": str(pod),
        "PET_NPROC_PER_NODE": "4",
    }


def sagemaker(host: int = 2) -> Environ:
    """Without a ``distribution``: each of two hosts runs the script once.

    ``SM_`` variables: aws/sagemaker-training-toolkit:ENVIRONMENT_VARIABLES.md, which has the
    hosts sorted; ``MASTER_`` and ``NCCL_`` variables:
    aws/sagemaker-pytorch-training-toolkit:src/sagemaker_pytorch_container/training.py
    """
    return {
        "MASTER_ADDR": "algo-1",
        "MASTER_PORT": "7777",
        "NCCL_SOCKET_IFNAME": "eth0",
        "SM_CURRENT_HOST": f"algo-{host}",
        "SM_HOSTS": '["algo-1","algo-2"]',
        "SM_NETWORK_INTERFACE_NAME": "eth0",
        "SM_NUM_GPUS": "4",
    }


def sagemaker_by_its_sdk(host: int = 2) -> Environ:
    """The same by the SDK's own drivers, which leave ``MASTER_`` variables unset.

    aws/sagemaker-python-sdk:src/sagemaker/modules/train/container_drivers/scripts/environment.py
    """
    return without(sagemaker(host), "MASTER_ADDR", "MASTER_PORT", "NCCL_SOCKET_IFNAME") | {
        "SM_CURRENT_HOST_RANK": str(host - 1),
        "SM_HOST_COUNT": "2",
        "SM_MASTER_ADDR": "algo-1",
        "SM_MASTER_PORT": "7777",
    }


def sagemaker_torchrun(rank: int = 3) -> Environ:
    """``distribution={"torch_distributed": ...}``: torchrun on each host, told the first's name.

    aws/sagemaker-training-toolkit:src/sagemaker_training/torch_distributed.py
    """
    of_torchrun = {"MASTER_ADDR": "algo-1", "MASTER_PORT": "7777", "TORCHELASTIC_RUN_ID": "none"}
    return sagemaker(rank // 2 + 1) | torchrun(rank) | of_torchrun


def sagemaker_mpirun(rank: int = 3) -> Environ:
    """``distribution={"mpi": ...}``: Open MPI on the first host, two ranks on each of two.

    It forwards ``SM_`` variables, so that all have the first host's, but not ``MASTER_`` ones,
    which only ranks on the first host inherit.
    aws/sagemaker-training-toolkit:src/sagemaker_training/mpi.py (MasterRunner) and runner.py
    """
    environ = sagemaker(host=1) | mpirun(rank, size=4)
    return environ if rank < 2 else without(environ, "MASTER_ADDR", "MASTER_PORT")


def modelarts(index: int = 1) -> Environ:
    """The second of two instances.

    https://support.huaweicloud.com/intl/en-us/usermanual-standard-modelarts/develop-modelarts-0104.html
    """
    return {
        "MA_CURRENT_IP": "192.168.23.38",
        "MA_NUM_GPUS": "8",
        "MA_NUM_HOSTS": "2",
        "MA_TASK_NAME": "worker",
        "VC_TASK_INDEX": str(index),
        "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job",
        "VC_WORKER_NUM": "2",
    }


def volcano() -> Environ:
    """The only pod of a Volcano job with its ``env`` plugin, as on any Kubernetes.

    volcano-sh/volcano:pkg/controllers/job/plugins/env/env.go
    """
    return {"VC_TASK_INDEX": "0", "VK_TASK_INDEX": "0"}


def ray_train(rank: int = 3) -> Environ:
    """Two workers on each of two nodes; a worker is in a process group before the script runs.

    ray-project/ray:python/ray/train/torch/config.py (_set_torch_distributed_env_vars, on_start)
    """
    return {
        "ACCELERATE_TORCH_DEVICE": "cpu",
        "LOCAL_RANK": str(rank % 2),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "41231",
        "NODE_RANK": str(rank // 2),
        "RANK": str(rank),
        "WORLD_SIZE": "4",
    }


def ray_train_uneven(rank: int) -> Environ:
    """Six workers where there was room: one node with one, one with one, one with four.

    Nodes are numbered as they appear, and their number is not told.
    ray-project/ray:python/ray/train/_internal/backend_executor.py, where it maps ranks to nodes
    """
    node = min(rank, 2)
    return ray_train(0) | {
        "LOCAL_RANK": str(rank - node),
        "LOCAL_WORLD_SIZE": str((1, 1, 4)[node]),
        "NODE_RANK": str(node),
        "RANK": str(rank),
        "WORLD_SIZE": "6",
    }


def ssh_shell() -> Environ:
    """A shell on a node of one's job (pam_slurm_adopt), with variables exported earlier."""
    return {
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "8",
        "SLURM_JOB_ID": "77",
    }


def mpirun_in_salloc(rank: int = 3) -> Environ:
    """Recorded: ``salloc -N2 -n4 mpirun -n 4``, whose daemons are a Slurm step of their own."""
    node = rank // 2
    daemons = {
        "SLURM_JOB_ID": "9",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(node),
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_PROCID": str(node),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    return daemons | mpirun(rank, size=4) | {"MASTER_ADDR": "n1"}


def without(environ: Environ, *names: str) -> Environ:
    """Return an environment without some variables."""
    return {name: value for name, value in environ.items() if name not in names}
