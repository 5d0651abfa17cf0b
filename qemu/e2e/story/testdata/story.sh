# How the scripts beside this one type what a user types. They source it.
set -euo pipefail

# Where the last output is, which is also shown.
said=$(mktemp)
trap 'rm -f "$said"' EXIT

step() { printf '\n======== %s\n' "$*"; }

fail() {
  printf '\nFAILED: %s\n' "$*"
  exit 1
}

# typed runs a line in this shell, as a user types it.
typed() {
  printf '\n$ %s\n' "$1"
  local code=0 shown
  exec 3> >(tee "$said")
  shown=$!
  eval "$1" >&3 2>&1 3>&- || code=$?
  exec 3>&-
  wait "$shown"
  return "$code"
}

# FILE is what a user types in the place of this word.
FILE=

# pasted runs the first thing like this in the last output, or in a file with an earlier one, as a user pastes it.
pasted() {
  local line
  line=$(grep -oE -m 1 -e "$1" "${2:-$said}" | head -n 1) || fail "nothing like '$1' was printed"
  typed "${line/FILE/\"$FILE\"}"
}

# refused is a line that has to fail, and say this.
refused() {
  if typed "$1"; then fail "it isn't refused: $1"; fi
  says "$2"
}

# says is what the last output has to say.
says() { grep -qE -e "$1" "$said" || fail "it doesn't say '$1'"; }

# until_it types a line again until it succeeds and says this, as often as it takes: who runs the script ends it if it takes too long.
until_it() {
  printf '\n$ %s   # until it says: %s\n' "$1" "$2"
  until eval "$1" >"$said" 2>&1 && grep -qE -e "$2" "$said"; do sleep 2; done
  cat "$said"
}
