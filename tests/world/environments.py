"""What launchers really set: recorded, or taken from their documentation where that is said.

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


def intel_mpi(rank: int = 1) -> Environ:
    """From the documentation of Intel MPI, whose launcher is a Hydra too."""
    return hydra(rank) | {"I_MPI_HYDRA_BOOTSTRAP": "ssh", "I_MPI_MPIRUN": "mpirun"}


def pals(rank: int = 5) -> Environ:
    """From HPE's ``man mpiexec`` of PALS: six ranks on three nodes, with an address given."""
    return {
        "MASTER_ADDR": "x1000c0s0b0n0",
        "PALS_APID": "5f5c1f0e-6a2e-4a36-9b7a-6a7f5f3a2f10",
        "PALS_LOCAL_RANKID": str(rank % 2),
        "PALS_NODEID": str(rank // 2),
        "PALS_RANKID": str(rank),
        "PMI_LOCAL_RANK": str(rank % 2),
        "PMI_LOCAL_SIZE": "2",
        "PMI_RANK": str(rank),
        "PMI_SIZE": "6",
    }


def kubeflow(rank: int = 1) -> Environ:
    """From the training operator's documentation: a PyTorchJob of one process a pod."""
    return {
        "MASTER_ADDR": "job-master-0",
        "MASTER_PORT": "23456",
        "PYTHONUNBUFFERED": "1",
        "RANK": str(rank),
        "WORLD_SIZE": "2",
    }


def kubeflow_with_nproc(pod: int = 1) -> Environ:
    """The same with ``nprocPerNode: 4``: RANK is the pod's, WORLD_SIZE counts processes."""
    return kubeflow(pod) | {
        "PET_MASTER_ADDR": "job-master-0",
        "PET_MASTER_PORT": "23456",
        "PET_NNODES": "2",
        "PET_NODE_RANK": str(pod),
        "PET_NPROC_PER_NODE": "4",
        "WORLD_SIZE": "8",
    }


def sagemaker() -> Environ:
    """From the SageMaker training toolkit's documentation: the second of two hosts."""
    return {
        "SM_CURRENT_HOST": "algo-2",
        "SM_HOSTS": '["algo-2","algo-1"]',
        "SM_NETWORK_INTERFACE_NAME": "eth0",
        "SM_NUM_GPUS": "4",
    }


def modelarts() -> Environ:
    """From the ModelArts documentation: the second of two hosts."""
    return {
        "MA_NUM_GPUS": "8",
        "MA_NUM_HOSTS": "2",
        "VC_TASK_INDEX": "1",
        "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job",
    }


def ray_train(rank: int = 3) -> Environ:
    """From the documentation of Ray Train's TorchTrainer: two workers on each of two nodes."""
    return {
        "LOCAL_RANK": str(rank % 2),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "41231",
        "NODE_RANK": str(rank // 2),
        "RANK": str(rank),
        "WORLD_SIZE": "4",
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
