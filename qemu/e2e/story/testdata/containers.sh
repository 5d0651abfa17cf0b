#!/usr/bin/env bash
# The first day of a new user, on a cluster whose nodes are containers of this machine: try it, an app with storage and an image of one's own, break
# and mend, remove a node, add a node. Each line is from README.md, from a page that it names, or was printed by the line before.
#
#	qemu/e2e/story/testdata/containers.sh REPOSITORY EMPTY-DIRECTORY
#
# It needs what README.md asks for, root and Docker.
here=$(cd "$(dirname "$0")" && pwd)
. "$here/story.sh"
repository=$1 cluster=story worker=story-worker-1
cd "$2"

step 'Try it (README.md, Two commands)'
typed "git clone $repository garboard"
typed 'cd garboard'
typed "make up CLUSTER=$cluster WORKERS=1 PROVISIONER=container"
cp "$said" ../up.txt
pasted 'export GARBOARDCONFIG=.*; out/gbctl services' ../up.txt
pasted "make kubectl[^']*'get pods -A'" ../up.txt
pasted 'export KUBECONFIG=[^)]*' ../up.txt
pasted 'make console.*' ../up.txt
pasted 'make chart.*' ../up.txt
typed 'export PATH=$PWD/out:$PATH'
typed 'gbctl health'
says '10\.5\.0\.2 .* serves'
says '10\.5\.0\.3 .* serves'
until_it 'gbctl -n 10.5.0.2 doctor' 'nothing is wrong'
typed "gbctl -n 10.5.0.2 patch mc --dry-run -p 'machine: {sysctls: {net.core.somaxconn: \"4242\"}}'"
says 'applied without a restart'
typed "gbctl -n 10.5.0.2 patch mc --try --try-timeout 10m -p 'machine: {sysctls: {net.core.somaxconn: \"4242\"}}'"
pasted 'gbctl -n 10\.5\.0\.2 config confirm'
typed 'gbctl -n 10.5.0.2 config history'

step 'An app with an image of its own (README.md, Everyday commands) and storage (docs/storage.md)'
typed "cp -r '$here/app' .. && cd .."
typed 'CGO_ENABLED=0 go build -o app/app app/main.go'
typed 'docker build -t app:dev app'
typed "gbctl cluster load --name $cluster app:dev"
typed "gbctl -n $worker patch mc -p 'machine: {disks: [{name: data, device: /dev/vdb, partitions: [{mountpoint: /var/mnt/visitors}]}]}'"
until_it "gbctl -n $worker get volumes" 'visitors .* true'
sed -i "s/NODE/$worker/" app/app.yaml
typed 'kubectl apply -f app/app.yaml'
visit="kubectl get --raw '/api/v1/namespaces/default/services/app:80/proxy/'"
until_it "$visit" 'visitor 1 of the first version'
sed -i 's/first version/second version/' app/main.go
typed 'CGO_ENABLED=0 go build -o app/app app/main.go && docker build -t app:dev app'
typed "gbctl cluster load --name $cluster app:dev"
typed 'kubectl rollout restart deployment/app'
until_it "$visit" 'visitor [2-9] of the second version'

# mended types the diagnosis until it has found what is wrong, pastes what it says, and waits until the node is well.
mended() {
  until_it "gbctl -n $1 doctor || true" "$2"
  pasted "$2"
  until_it "gbctl -n $1 doctor" 'nothing is wrong'
}

step 'Break and mend (docs/troubleshooting.md)'
refused "gbctl -n 10.5.0.2 service etcd stop" '--force'
typed 'gbctl -n 10.5.0.2 service etcd stop --force'
mended 10.5.0.2 'gbctl -n [^ ]+ service etcd start'
typed "gbctl -n $worker service kubelet stop"
mended $worker 'gbctl -n [^ ]+ service kubelet start'
typed "kubectl cordon $worker"
mended $worker "kubectl uncordon $worker"
typed "gbctl -n $worker patch mc -p 'machine: {kubelet: {extraArgs: {no-such-flag: \"1\"}}}'"
until_it "gbctl -n $worker doctor || true" 'unknown flag: --no-such-flag'
typed "gbctl -n $worker config rollback"
until_it "gbctl -n $worker doctor" 'nothing is wrong'
typed 'kubectl set image deployment/app app=app:tpyo'
until_it "gbctl -n $worker doctor || true" 'app:tpyo'
says "Correct the image's name"
typed 'kubectl rollout undo deployment/app'
until_it "$visit" 'visitor [0-9]+ of the second version'
until_it "gbctl -n $worker doctor" 'nothing is wrong'

step 'Remove a node (docs/clusters.md)'
typed 'gbctl -n 10.5.0.2 etcd snapshot etcd.db'
typed "gbctl -n $worker reset --dry-run"
typed "gbctl -n $worker reset --yes"
until_it 'gbctl cluster show' "$worker .* off"
typed 'kubectl get nodes'
if grep -q "$worker" "$said"; then fail "$worker is still in Kubernetes"; fi
refused 'gbctl -n 10.5.0.2 reset --yes' 'etcd'

step 'Add a node: the machine starts again, and waits for a configuration (README.md, Reboot and reset; that of a node is beside its cluster)'
typed "gbctl cluster debug on $worker --name $cluster"
until_it "make -C garboard console CLUSTER=$cluster NODE=worker-1 | tail -n 40" 'apply a configuration with: gbctl apply-config .* FILE'
FILE=$HOME/.garboard/clusters/$cluster/$worker/config.yaml
pasted 'gbctl apply-config .* FILE'
pasted 'gbctl -n [^ ]+ health --wait [^ ]+m'
until_it 'kubectl get nodes' "$worker +Ready"
typed "gbctl -n $worker patch mc -p 'machine: {disks: [{name: data, device: /dev/vdb, partitions: [{mountpoint: /var/mnt/visitors}]}]}'"
until_it "$visit" 'visitor [0-9]+ of'
typed "gbctl -n $worker reboot --wait"
until_it "$visit" 'visitor [0-9]+ of the second version'
until_it 'gbctl -n 10.5.0.2 doctor' 'nothing is wrong'

step 'The end'
typed 'cd garboard'
pasted 'make down.*' ../up.txt
says 'is gone'
typed 'gbctl cluster show'
says 'no cluster'
