//go:build e2e && long

package adopt

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// etcdctl asks the old member, with kubeadm's keys.
func (a *adoption) etcdctl(args ...string) string {
	a.t.Helper()
	const keys = "/etc/kubernetes/pki/etcd/"
	out, err := a.old.run("etcdctl", append([]string{"--endpoints=https://127.0.0.1:2379", "--cacert=" + keys + "ca.crt", "--cert=" + keys + "peer.crt", "--key=" + keys + "peer.key"}, args...)...)
	if err != nil {
		a.t.Fatal(err)
	}
	return out
}

func (a *adoption) file(inside string) []byte {
	a.t.Helper()
	text, err := os.ReadFile(a.old.path(inside))
	if err != nil {
		a.t.Fatal(err)
	}
	return text
}

// try is kubectl with the admin.conf of the cluster's users.
func (a *adoption) try(args ...string) (string, error) {
	return a.run("", append([]string{"--kubeconfig=" + a.old.path(adminConf)}, args...)...)
}

func (a *adoption) kubectl(args ...string) string {
	a.t.Helper()
	out, err := a.try(args...)
	if err != nil {
		a.t.Fatal(err)
	}
	return out
}

func (a *adoption) kubectlWith(stdin string, args ...string) {
	a.t.Helper()
	if _, err := a.run(stdin, append([]string{"--kubeconfig=" + a.old.path(adminConf)}, args...)...); err != nil {
		a.t.Fatal(err)
	}
}

// run runs kubectl in the nodes' network.
func (a *adoption) run(stdin string, args ...string) (string, error) {
	cmd := exec.CommandContext(a.t.Context(), a.kubectlIn, append(args, "--request-timeout=30s")...)
	cmd.Stdin = strings.NewReader(stdin)
	var out, complaints bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaints
	if err := a.nodes.Do(cmd.Start); err != nil {
		return "", err
	}
	if err := cmd.Wait(); err != nil {
		return out.String(), fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, complaints.String())
	}
	return out.String(), nil
}
