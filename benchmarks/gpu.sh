#!/usr/bin/env bash
# What one NVIDIA GPU does with canvax: right first, then where the time goes, then fast beside PyTorch. docs/gpu.md has
# what was found, and what was not run: begin with that.
#
#     benchmarks/gpu.sh                     every part, in order of worth
#     benchmarks/gpu.sh checks sdxl         these
#     LIMIT=600 benchmarks/gpu.sh emoji     train the bundled model on $DRAWINGS (out/emoji.zip) for 9 of 10 minutes, again
#                                           until it is finished; TRAIN has further flags
#     SMALL=yes benchmarks/gpu.sh           try it on any machine: the bundled model in place of the large ones
#
# Each part ends after LIMIT seconds (300) whatever happens, and writes $OUT/PART.json (out/gpu); what a part printed is
# in $OUT/PART.log. A part whose JSON is there is not run again; the output of a failed one stays in $OUT/PART.out.
# PYTHON has JAX for CUDA, PyTorch, diffusers and what canvax needs. Random weights go to $MODELS (out/models), 7 GB for
# SDXL, and stay there for the next time, as do compiled programs: what compiling takes is in "start".
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-out/gpu}
MODELS=${MODELS:-out/models}
LIMIT=${LIMIT:-300}
SMALL=${SMALL:-no}
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT" "$MODELS"
OUT=$(realpath "$OUT") MODELS=$(realpath "$MODELS")
export CANVAX_CACHE_DIR=$MODELS/programs

if [ "$SMALL" = yes ]; then
    DEVICE=cpu; DTYPE=float32; TRY=(--small)
    size() { echo 256x256; }
    steps() { echo 4; }
    folder() { echo emoji; }
else
    DEVICE=gpu; DTYPE=bfloat16; TRY=()
    size() { echo "$1"; }
    steps() { echo "$1"; }
    folder() { # of random weights, made once
        (
            flock 9 # it may be under way
            [ -e "$MODELS/$1/model_index.json" ] || "$PYTHON" -m benchmarks.lab.models "$1" "$MODELS/$1" 1>&2
        ) 9>"$MODELS/$1.lock"
        echo "$MODELS/$1"
    }
    # The CPU as well: what the GPU gives is compared with it. No memory in advance: PyTorch takes its turns on the same GPU.
    export JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false
fi

# beside NAME PART MODEL SIZE STEPS BATCH PEER...: the lab's own comparison, by turns, outputs compared first
beside() {
    local part=$1 model=$2 where=$3 count=$4 batch=$5; shift 5
    local peers=(); for peer in "$@"; do peers+=(--against "$peer"); done
    "$PYTHON" -m benchmarks "$part" --model "$(folder "$model")" --size "$(size "$where")" --steps "$(steps "$count")" \
        --batch "$batch" --dtype "$DTYPE" --device "$DEVICE" --rounds "${ROUNDS:-3}" --programs "$CANVAX_CACHE_DIR" --json \
        ${peers[@]+"${peers[@]}"}
}

# load MODEL MIX BATCHES CLIENTS SECONDS: a server of one image at a time and one by steps, asked by clients who wait
load() {
    local mix=$2; [ "$SMALL" = yes ] && mix=alike
    "$PYTHON" -m benchmarks.serve_load --model "$(folder "$1")" --mix "$mix" --batching none steps --batches $3 \
        --closed $4 --seconds "$5" --previews 0
}

# waiting PART MODEL MIX SIZE BATCHES OPTION...: the same servers; $OUT/PART.json has the ratios to one image at a time
waiting() {
    local part=$1 model=$2 mix=$3 where=$4 batches=$5 seconds=12; shift 5
    [ "$SMALL" = yes ] && where=64x64 batches="1 4" seconds=3
    "$PYTHON" -m benchmarks.serve_load --model "$model" --mix "$mix" --size "$where" --batching none steps \
        --batches $batches --seconds $seconds --json "$OUT/$part.json" "$@" 1>&2
}

# training PART MODEL BATCH OPTION...: steps a second and memory of a LoRA beside PyTorch, with all activations kept and without
training() {
    local shape=(--size 1024 --remat both); [ "$SMALL" = yes ] && shape=(--size 64 --remat yes --chunk 2 --rounds 1)
    "$PYTHON" -m benchmarks.train --model "$2" "${shape[@]}" --batch "$3" --dtype "$DTYPE" \
        --device "$DEVICE" --programs "$MODELS/xla" --json "$OUT/$1.partial" "${@:4}" 1>&2
    local code=$?
    mv "$OUT/$1.partial" "$OUT/$1.json" # not where the time was over: then the part runs again
    return $code
}

all_of() { # PROCESS...: waits for them, and fails if one did
    local failed=0 process
    for process; do wait "$process" || failed=1; done
    return $failed
}
part_machine() { "$PYTHON" - <<'PY'
import json, subprocess
from importlib.metadata import version
import jax
def told(*command):
    try: return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError as error: return str(error)
names = ("jax", "jaxlib", "torch", "diffusers", "transformers")
def number(name):
    try: return version(name)
    except Exception: return None
print(json.dumps({
    "devices": [d.device_kind for d in jax.devices()], "versions": {name: number(name) for name in names},
    "nvidia-smi": told("nvidia-smi", "--query-gpu=name,driver_version,memory.total,power.limit", "--format=csv,noheader"),
}))
PY
}
part_checks() { # beside each other, and beside the writing of weights: nothing is timed
    local waited=()
    [ "$SMALL" = yes ] || for model in sdxl sd15; do folder $model >/dev/null & waited+=($!); done
    for check in attention pictures cache sd15; do
        "$PYTHON" -m benchmarks.gpu_checks --only $check --json "$OUT/check-$check.json" ${TRY[@]+"${TRY[@]}"} 1>&2 &
        waited+=($!)
    done
    all_of "${waited[@]}"
}
compiled() { [ ! -e "$OUT/warm-$1" ] || echo torch-compile-default; } # its programs are in PyTorch's cache
warm() { # MODEL SIZE: PyTorch's compiled programs
    TORCHINDUCTOR_COMPILE_THREADS=5 ROUNDS=1 beside picture "$1" "$2" 2 1 torch-compile-default >"$OUT/warm-$1.json" &&
        touch "$OUT/warm-$1"
}
part_warm() { # what later parts compile, all at the same time, for the caches; what is timed by it is not kept
    local waited=()
    [ "$SMALL" = yes ] || for model in sdxl sd15; do folder $model >/dev/null & waited+=($!); done
    all_of ${waited[@]+"${waited[@]}"}
    warm sdxl 1024x1024 & waited=($!)
    warm sd15 512x512 & waited+=($!)
    load sdxl large "1 4" 1 1 >/dev/null & waited+=($!)
    load sd15 middling "1 4 8" 1 1 >/dev/null & waited+=($!)
    all_of "${waited[@]}"
}
part_check_xl() { "$PYTHON" -m benchmarks.gpu_checks --only sdxl --json "$OUT/check-sdxl.json" ${TRY[@]+"${TRY[@]}"} 1>&2; }
part_sdxl() { beside picture sdxl 1024x1024 30 1 torch $(compiled sdxl); }
part_sd15() { beside picture sd15 512x512 50 1 torch $(compiled sd15); }
part_vae() { beside vae sdxl 1024x1024 1 1 torch; }
part_unet() { beside unet sdxl 1024x1024 1 1 torch; }
part_batch() { beside picture sdxl 1024x1024 30 8; }
profile() { "$PYTHON" -m benchmarks.gpu_profile --model "$(folder sdxl)" --size "$(size 1024x1024)" --steps 4 --batch "$2" \
    --dtype "$DTYPE" --json "$OUT/$1.json" --hlo "$OUT/hlo-$1" 1>&2; }
part_profile() { profile profile 1; }
part_profile8() { profile profile8 8; }
part_variants() { [ "$SMALL" = yes ] || "$PYTHON" -m benchmarks.gpu_variants --model "$(folder sdxl)" --dtype "$DTYPE" \
    --json "$OUT/variants.json" 1>&2; }
part_variants15() { [ "$SMALL" = yes ] || "$PYTHON" -m benchmarks.gpu_variants --model "$(folder sd15)" --size 512x512 \
    --dtype "$DTYPE" --only base whole-sums merged lt no-triton --json "$OUT/variants15.json" 1>&2; }
eight_bits() { # PART FOLDER OPTION...: matmuls in 8 bits beside 16, one evaluation of the denoiser
    "$PYTHON" -m benchmarks.gpu_variants --model "$2" --dtype "$DTYPE" --only base float8 float8-w8a8 int8-w8a8 \
        --size "$(size 1024x1024)" --json "$OUT/$1.json" "${@:3}" 1>&2
}
part_8bit() { [ "$SMALL" = yes ] || eight_bits 8bit "$(folder sdxl)" --batch 8; }
part_start() { ROUNDS=2 beside start sdxl 1024x1024 4 1 torch; }
part_compiled() { beside unet sd15 512x512 1 1 torch torch-compile; } # to the utmost: minutes
part_server() { load sdxl large "1 4" "1 4 16" 16; }
part_server15() { load sd15 middling "1 4 8" "1 16" 15; }
part_emoji() { # goes on where the last call stopped; fails until the model is finished, so that its JSON is not there
    local recipe=gpu report; [ "$SMALL" = yes ] && recipe=smoke
    report=$(JAX_COMPILATION_CACHE_DIR=$CANVAX_CACHE_DIR/training "$PYTHON" -m recipes.emoji train "${DRAWINGS:-out/emoji.zip}" \
        --output "$OUT/emoji-model" --recipe $recipe --stop-after "$(awk "BEGIN { print ($LIMIT - 60) / 60 }")" --json ${TRAIN:-})
    echo "$report"
    [[ $report == *'"finished": true'* ]]
}
part_few() { waiting few "$(family klein)" few 512x512 "1 4 8" --closed 1 8 16; }
part_few15() { waiting few15 "$(folder sd15)" few 512x512 "1 4 8" --closed 1 8 16; }
part_mixed() { waiting mixed "$(folder sdxl)" "short and long" 1024x1024 "1 4" --batching steps --beside 1 3; }
part_train_xl() { training train_xl "$(folder sdxl)" 1; }
part_train_script() { training train_script "$(folder sdxl)" 1 --remat yes --against torch-vae; } # encodes in each step, as the script
part_train_xl4() { training train_xl4 "$(folder sdxl)" 4; }
part_train_klein() { training train_klein "$(family klein)" 1; }
part_train_klein4() { training train_klein4 "$(family klein)" 4; }
part_parity() { JAX_DEFAULT_MATMUL_PRECISION=highest "$PYTHON" -m benchmarks.parity_full_size --families sd15 1>&2; }

# Transformers of few steps. Their weights, of 16 to 35 GB, are written by the first part of a family; those of another
# one go then, since a disk may hold one alone. Where memory is plenty, MODELS=/dev/shm/models writes them fastest.
family() { # klein, z_image or krea: its folder
    local names
    case $1 in
        klein) names=(flux2-klein-4b flux2-klein-small) ;;
        z_image) names=(z-image z-image-small) ;;
        krea) names=(krea-2 krea-2-small) ;;
    esac
    local name=${names[0]}; [ "$SMALL" = no ] || name=${names[1]}
    (
        flock 9
        for other in "$MODELS"/few-steps/*; do [ "$other" = "$MODELS/few-steps/$name" ] || rm -rf "$other"; done
        if [ ! -e "$MODELS/few-steps/$name/model_index.json" ]; then
            rm -rf "$MODELS/few-steps/$name" # half written
            "$PYTHON" -m benchmarks.lab.models "$name" "$MODELS/few-steps/$name" 1>&2
        fi
    ) 9>"$MODELS/few-steps.lock" || return
    echo "$MODELS/few-steps/$name"
}
few() { # PART FAMILY BATCH FLAG...: as many steps as the model is made for
    local part=$1 name=$2 batch=$3 model; shift 3
    model=$(family "$name") || return
    "$PYTHON" -m benchmarks "$part" --model "$model" --size "$(size 1024x1024)" --batch "$batch" --dtype "$DTYPE" \
        --device "$DEVICE" --rounds "${ROUNDS:-3}" --programs "$CANVAX_CACHE_DIR" --json "$@"
}
weights() { # FAMILY: how long writing takes
    local began=$SECONDS model; model=$(family "$1") || return
    echo "{\"bytes\": $(du -sbL "$model" | cut -f1), \"seconds\": $((SECONDS - began))}"
}
export -f family few weights
for name in klein z_image krea; do
    eval "part_${name}_weights() { weights $name; }"
    eval "part_${name}() { few picture $name 1 --against torch --against torch-compile-default; }"
    eval "part_${name}_batch() { few picture $name 4 --against torch-compile-default; }"
    eval "part_${name}_start() { ROUNDS=1 few start $name 1 --against torch; }"
    eval "part_${name}_padded() { few picture $name 1 --padding default --against torch; }" # by diffusers to 512 tokens
    eval "part_${name}_8bit() { eight_bits ${name}_8bit \"\$(family $name)\"; }"
    FAMILIES+=("${name}_weights" "$name" "${name}_batch" "${name}_8bit" "${name}_start" "${name}_padded")
    [ $name != klein ] || FAMILIES+=(few train_klein train_klein4)
done

parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(machine checks warm profile profile8 sdxl sd15 variants variants15 8bit vae batch server server15 few15 mixed
    train_xl train_script train_xl4 start compiled unet check_xl parity "${FAMILIES[@]}")
failed=0
for part in "${parts[@]}"; do
    [ ! -s "$OUT/$part.json" ] || { echo "$part: $OUT/$part.json is there"; continue; }
    began=$SECONDS
    # An exported function in a shell of its own, so that timeout can end it and all that it started.
    export -f "part_$part" all_of beside load waiting training eight_bits warm compiled profile size steps folder
    export PYTHON OUT MODELS DEVICE DTYPE SMALL LIMIT
    try="${TRY[*]-}" timeout --kill-after=10 "$LIMIT" bash -c "TRY=(\$try); part_$part" >"$OUT/$part.out" 2>"$OUT/$part.log"
    code=$?
    [ $code -eq 0 ] || failed=1
    if [ ! -s "$OUT/$part.out" ]; then rm -f "$OUT/$part.out"; elif [ $code -eq 0 ]; then mv "$OUT/$part.out" "$OUT/$part.json"; fi
    echo "$part: exit $code, $((SECONDS - began)) s; $(tail -c 300 "$OUT/$part.log" | tail -1)"
done
exit $failed
