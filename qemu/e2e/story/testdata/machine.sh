#!/usr/bin/env bash
# A new user's own machine: make a medium, boot the machine from it, install it, use Kubernetes, upgrade the machine, and go back. Each line is from
# README.md (Your own machines), from docs/media.md, or was printed by the line before.
#
#	qemu/e2e/story/testdata/machine.sh make REPOSITORY EMPTY-DIRECTORY
#	# boot the machine from EMPTY-DIRECTORY/garboard/garboard.iso
#	qemu/e2e/story/testdata/machine.sh use DIRECTORY ADDRESS FINGERPRINT REGISTRY
#
# The address and the fingerprint are on the console of the machine. The registry is one without TLS, to which anybody may push, such as 192.168.1.2:5000.
# WAIT is for the node to be healthy, ASK is --timeout 5m for a machine that is emulated, and ARGUMENTS are further ones for media. It needs what
# README.md asks for, and kubectl.
here=$(cd "$(dirname "$0")" && pwd)
. "$here/story.sh"

make_media() {
  cd "$2"
  step 'A medium (README.md, Your own machines)'
  typed "git clone $1 garboard"
  typed 'cd garboard'
  typed 'make images gbctl'
  typed 'export PATH=$PWD/out:$PATH'
  typed "gbctl media build --images out/images.tar ${ARGUMENTS:-}"
  step 'The next release (docs/releasing.md, Names) as an installer image (docs/media.md)'
  typed "GARBOARD_VERSION=v0.2.0 gbctl media build installer ${ARGUMENTS:-}"
  typed 'gbctl version --client'
  says 'v0\.1\.0-dev\+'
}

use() {
  local address=$2 fingerprint=$3 registry=$4 disk
  cd "$1/garboard"
  export PATH=$PWD/out:$PATH
  step 'The machine waits for its configuration'
  typed "gbctl -n $address disks --insecure ${ASK:-}"
  disk=$(grep -oE '/dev/(sd|vd|nvme)[a-z0-9]+' "$said" | head -n 1)
  typed "gbctl gen config home https://$address:6443 --install-disk $disk --config-patch-control-plane '{cluster: {allowSchedulingOnControlPlanes: true}}' \
--config-patch '{machine: {registries: {mirrors: {\"$registry\": {endpoints: [\"http://$registry\"]}}}}}'"
  cp "$said" ../gen.txt
  pasted 'export GARBOARDCONFIG=.*' ../gen.txt
  typed "gbctl -n $address apply-config --insecure --fingerprint $fingerprint -f init.yaml --dry-run ${ASK:-}"
  says "$disk"
  typed "$(grep -oE 'gbctl apply-config .*' ../gen.txt | sed "s/ADDRESS/$address/") --fingerprint $fingerprint ${ASK:-}"
  typed "$(grep -oE 'gbctl -n [^ ]+ health --wait ' "$said")${WAIT:-10m}"
  typed "gbctl -n $address kubeconfig ${ASK:-}"
  typed 'kubectl get nodes'
  says ' Ready '
  typed 'gbctl doctor || true' # a network without a name server and a time server is a finding, too
  typed "gbctl -n $address get slots ${ASK:-}"
  says 'A .* good '

  step 'Upgrade (docs/media.md)'
  typed 'kubectl create configmap kept --from-literal=data=here'
  typed "gbctl images push garboard-installer.tar $registry --insecure"
  typed "gbctl -n $address upgrade --image $registry/garboard-os/installer:v0.2.0 ${ASK:-}"
  typed "gbctl -n $address get slots ${ASK:-}"
  says 'good +v0\.2\.0.* yes'
  typed "gbctl -n $address version ${ASK:-}"
  says 'v0\.2\.0'
  typed "gbctl -n $address health --wait ${WAIT:-10m}"
  until_it 'kubectl get nodes -o wide' ' Ready .*v0\.2\.0'
  until_it 'kubectl get configmap kept' 'kept'

  step 'Go back (docs/media.md)'
  typed "gbctl -n $address rollback ${ASK:-}"
  typed "gbctl -n $address get slots ${ASK:-}"
  says 'good +v0\.1\.0-dev.* yes'
  typed "gbctl -n $address health --wait ${WAIT:-10m}"
  until_it 'kubectl get nodes -o wide' ' Ready .*v0\.1\.0-dev'
  until_it 'kubectl get configmap kept' 'kept'
}

case $1 in
make) make_media "$2" "$3" ;;
use) use "$2" "$3" "$4" "$5" ;;
*) fail "$0 make, or $0 use" ;;
esac
