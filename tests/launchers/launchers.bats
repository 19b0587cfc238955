#!/usr/bin/env bats
# What the launchers decide: commands, ends, exit codes. ssh, srun, scontrol and the nodes are those of stubs/.
# Run by test_scripts.py, or by hand:   bats tests/launchers/launchers.bats

setup() {
    repository=$(cd "$BATS_TEST_DIRNAME/../.." && pwd)
    cd "$BATS_TEST_TMPDIR" || return 1
    export STUBS=$BATS_TEST_TMPDIR OMNI_PYTHON=$BATS_TEST_DIRNAME/stubs/node TMPDIR=$BATS_TEST_TMPDIR
    export PATH=$BATS_TEST_DIRNAME/stubs:$PATH PYTHON=${PYTHON:-python3}
    printf '# the cluster\nadmin@first # runs the coordinator\n\n second  \n\tthird\n' > hosts.txt
    launcher=
}

teardown() {
    [[ -z $launcher ]] || kill -KILL -- "-$launcher" 2> /dev/null || true
}

# launch SCRIPT [ARGUMENTS]: in a session of its own, as in a terminal; what it says is in the file `output`.
launch() {
    setsid env --default-signal=INT "$repository/launch/$1" "${@:2}" < /dev/null > output 2>&1 3>&- &
    launcher=$!
}

# said TEXT [COUNT]: waits until it stands there so many times.
said() {
    local turn
    for ((turn = 0; turn < 1600; turn++)); do
        [[ $(grep -cF -- "$1" output) -lt ${2:-1} ]] || return 0
        sleep 0.05
    done
    echo "waited in vain for ${2:-1} x '$1':" && cat output && return 1
}

# ends_with CODE: it ends within a minute and leaves no process behind.
ends_with() {
    local turn code=0
    for ((turn = 0; turn < 1200; turn++)); do
        kill -0 "$launcher" 2> /dev/null || break
        sleep 0.05
    done
    cat output
    ! kill -0 "$launcher" 2> /dev/null || { echo "it has not ended"; return 1; }
    wait "$launcher" || code=$?
    [[ $code == "$1" ]] || { echo "exit code $code"; return 1; }
    for ((turn = 0; turn < 100; turn++)); do
        lives || return 0
        sleep 0.05
    done
    echo "a process of it lives on" && return 1
}

# lives: a process of its session does.
lives() {
    awk -v session="$launcher" '{ sub(/^.*\) /, ""); if ($1 != "Z" && $4 == session) found = 1 } END { exit !found }' \
        /proc/[0-9]*/stat 2> /dev/null
}

times() { [[ $(grep -cF -- "$2" output) == "$1" ]]; }

job() {
    export SLURM_JOB_ID=1234567 SLURM_NNODES=2 SLURM_JOB_NODELIST='n[1-2]' OMNI_DIR=$repository
}

@test "each script explains itself" {
    export OMNI_DIR=$repository
    for script in single_node.sh ssh_nodes.sh slurm.sbatch ray.sh; do
        run "$repository/launch/$script" --help
        [[ $status == 0 && $output == *"launch/$script"* && $output != *source* ]]
        run "$repository/launch/$script"
        [[ $status == 2 && $output == *"launch/$script"* ]]
    done
}

@test "one node: all arguments reach it, one signal ends it" {
    launch single_node.sh "a config.yaml" --http 127.0.0.1:0
    said "called with <a config.yaml> <--http> <127.0.0.1:0>"
    kill -TERM "$launcher"
    ends_with 0
}

@test "ssh: every host gets its command" {
    OMNI_PORT=7001 launch ssh_nodes.sh hosts.txt c.yaml --set "name=it's \$HOME"
    said "called with" 3
    [[ $(sort hosts) == $'admin@first\nsecond\nthird' ]]
    common="--master-addr> <first> <--master-port> <7001>" extra="<--set> <name=it's \$HOME>"
    said "[0 admin@first] called with <c.yaml> <--nnodes> <3> <--node-rank> <0> <$common $extra"
    said "[1 second] called with <c.yaml> <--nnodes> <3> <--node-rank> <1> <$common <--headless> $extra"
    said "[2 third] called with <c.yaml> <--nnodes> <3> <--node-rank> <2> <$common <--headless> $extra"
}

@test "ssh: Ctrl-C ends all in order" {
    launch ssh_nodes.sh hosts.txt c.yaml
    said "called with" 3
    kill -INT -- "-$launcher"
    ends_with 0
    times 3 "stops in order"
}

@test "ssh: the first node fails and all end with its log and its code" {
    FAKE="fail 0" launch ssh_nodes.sh hosts.txt c.yaml
    ends_with 3
    times 1 "node 0 cannot load" && times 1 "exit code 3; ending all" && times 2 "stops in order"
}

@test "ssh: the last node fails and all end with its log and its code" {
    FAKE="fail 2" launch ssh_nodes.sh hosts.txt c.yaml
    ends_with 3
    times 1 "node 2 cannot load" && times 1 "exit code 3; ending all" && times 2 "stops in order"
}

@test "ssh: a node that ends well ends all well" {
    FAKE="end 0" launch ssh_nodes.sh hosts.txt c.yaml
    ends_with 0
    times 2 "stops in order"
}

@test "ssh: wrong usage is said at once" {
    run "$repository/launch/ssh_nodes.sh" hosts.txt
    [[ $status == 2 && $output == *"the pipeline's YAML"* ]]
    run "$repository/launch/ssh_nodes.sh" nowhere c.yaml
    [[ $status == 2 && $output == *"cannot read"* ]]
    run "$repository/launch/ssh_nodes.sh" /dev/null c.yaml
    [[ $status == 2 && $output == *"no host"* ]]
}

@test "Ray: the driver gets all arguments, and the place of the YAML" {
    touch c.yaml
    launch ray.sh c.yaml --nnodes 2 --keys "a folder"
    said "called with <$PWD/c.yaml> <--nnodes> <2> <--keys> <a folder>"
    kill -TERM "$launcher"
    ends_with 0
    launch ray.sh qwen2_5_omni
    said "called with <qwen2_5_omni>"
    kill -TERM "$launcher"
    ends_with 0
}

@test "Slurm: one task a node, each with the job's port; TERM to the batch script ends all" {
    job
    launch slurm.sbatch c.yaml --keys "a folder"
    said "called with <c.yaml> <--master-port> <24567> <--keys> <a folder>" 2
    for option in --ntasks-per-node=1 --kill-on-bad-exit=1 "--wait=30 "; do grep -qF -- "$option" srun; done
    kill -TERM "$launcher"
    ends_with 0
    times 2 "stops in order"
    [[ $(< scontrol) != *requeue* ]]
}

@test "Slurm: a preempted job ends in order and is queued again" {
    job
    PREEMPTED=2026-11-22T12:00:00 SLURM_RESTART_COUNT=1 OMNI_STOP_SECONDS=90 launch slurm.sbatch c.yaml
    said "started again, for the 1. time"
    said "called with" 2
    grep -qF -- "--wait=90 " srun
    kill -TERM "$launcher"
    ends_with 0
    times 2 "stops in order" && times 1 "preempted; it is queued again"
    grep -qx "requeue 1234567" scontrol
}

@test "Slurm: a preempted job that cannot be queued again says so" {
    job
    PREEMPTED=2026-11-22T12:00:00 REFUSES=1 launch slurm.sbatch c.yaml
    said "called with" 2
    kill -TERM "$launcher"
    ends_with 2
    times 1 "Job violates policy" && times 1 "submit job 1234567 once more"
}

@test "Slurm: each task of an array has its own pipeline; elsewhere %a is left alone" {
    job
    SLURM_ARRAY_TASK_ID=3 launch slurm.sbatch "p%a.yaml" --http "127.0.0.1:800%a" --set "name=%a%a"
    said "called with <p3.yaml> <--master-port> <24567> <--http> <127.0.0.1:8003> <--set> <name=33>" 2
    kill -TERM "$launcher"
    ends_with 0
    launch slurm.sbatch "p%a.yaml"
    said "called with <p%a.yaml>" 2
    kill -TERM "$launcher"
    ends_with 0
}

@test "Slurm: a failure is handed on" {
    job
    FAKE="fail 1" launch slurm.sbatch c.yaml
    ends_with 3
    times 1 "node 1 cannot load"
}

@test "Slurm: outside of a job" {
    OMNI_DIR=$repository run "$repository/launch/slurm.sbatch" c.yaml
    [[ $status == 2 && $output == *"no Slurm job"* ]]
}
