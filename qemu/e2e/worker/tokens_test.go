//go:build e2e

package worker

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

const (
	// cleanBudget is for kube-controller-manager to remove a token that has ended, and for a control
	// plane to look for missing objects after that.
	cleanBudget   = 60 * time.Second
	kubeletBudget = 60 * time.Second // for a kubelet to be up and its node Ready after a restart
)

// ended: a token that ends lets nobody join any more, and that of the configuration isn't made
// again; neither does trustd sign for it. The cluster goes on without any token: a node needs one only to join.
func ended(t *testing.T, c *e2etest.Cluster, control, worker qemu.Node) {
	made := c.Gbctl("-n", control.Name, "token", "create", "--ttl", "10m", "--description", "rack 4")
	both := strings.Fields(made)
	token := both[len(both)-1]
	id, secret, _ := strings.Cut(token, ".")
	configured := string(c.Secrets().BootstrapToken)
	first, _, _ := strings.Cut(configured, ".")
	list := c.Gbctl("-n", control.Name, "token", "list")
	machines := string(c.Secrets().MachineToken)
	last, _, _ := strings.Cut(machines, ".")
	if !e2etest.Row(list, id, "rack", "4") || !e2etest.Row(list, last, "never", "machine.token") || !e2etest.Row(list, first, "never", "cluster.token") || secret == "" || strings.Contains(list, secret) {
		t.Fatalf("tokens are\n%s", list)
	}
	who := func(token string) error {
		_, err := c.Try("--kubeconfig", bearer(t, c, token), "auth", "whoami")
		return err
	}
	requested(t, c, bearer(t, c, token), "joins", "rack-4", machine(t, c, control, token, "rack-4"))
	decided(c, "joins", "Approved ", "")
	c.Gbctl("-n", control.Name, "token", "revoke", id)
	strange(t, c, control, token)
	c.Eventually(attackBudget, "the token has ended", func() error { return refused(who(token)) })
	if err := who(configured); err != nil {
		t.Errorf("the token of the configuration: %v", err)
	}

	if _, err := signed(t, c, control, machines, "by-file"); err != nil {
		t.Errorf("trustd, with machine.token: %v", err)
	}
	c.Gbctl("-n", control.Name, "token", "revoke", last)
	strange(t, c, control, machines)
	c.Gbctl("-n", control.Name, "token", "revoke", first)
	c.Eventually(attackBudget, "the token of the configuration has ended", func() error { return refused(who(configured)) })
	c.Eventually(cleanBudget, "Kubernetes has tried to remove the tokens", func() error {
		got, err := c.Try("-n", "kube-system", "get", "secrets", "--field-selector", "type=bootstrap.kubernetes.io/token", "-o", "jsonpath={range .items[*]}{.metadata.name} {.metadata.deletionTimestamp} {end}")
		if fields := strings.Fields(got); err == nil && (len(fields) != 2 || fields[0] != "bootstrap-token-"+first) {
			err = fmt.Errorf("there are %q", got)
		}
		return err
	})
	// A change of the manifests makes a control plane look for missing objects.
	c.Gbctl("-n", control.Name, "patch", "mc", "-p", "cluster: {inlineManifests: [{name: mark, contents: '{apiVersion: v1, kind: ConfigMap, metadata: {name: mark, namespace: default}}'}]}")
	c.Eventually(cleanBudget, "missing objects are made", func() error {
		_, err := c.Try("-n", "default", "get", "configmap", "mark")
		return err
	})
	if err := refused(who(configured)); err != nil {
		t.Errorf("the token of the configuration is there again: %v", err)
	}
	if list := c.Gbctl("-n", control.Name, "token", "list"); !e2etest.Row(list, first, "has", "ended") || !e2etest.Row(list, last, "has", "ended") || strings.Contains(list, id) {
		t.Errorf("tokens are\n%s", list)
	}

	for _, node := range []qemu.Node{worker, control} {
		c.Gbctl("-n", node.Name, "service", "kubelet", "restart")
		c.Eventually(kubeletBudget, node.Name+" goes on without a token", func() error {
			out, err := c.TryGbctl("-n", node.Name, "service", "kubelet")
			if err == nil && !strings.Contains(out, "Running") {
				err = errors.New(out)
			}
			if err != nil {
				return err
			}
			ready, err := c.Try("get", "node", node.Name, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
			if err == nil && ready != "True" {
				err = fmt.Errorf("Ready is %q", ready)
			}
			return err
		})
	}
	// What the worker joined with isn't needed to change its configuration either.
	c.Gbctl("-n", worker.Name, "patch", "mc", "-p", "{machine: {token: "+token+"}, cluster: {token: "+token+"}}")

	// A worker has all that a worker may have, and answers for no control plane.
	if _, err := c.TryGbctl("-n", worker.Name, "etcd", "members"); err == nil || !strings.Contains(err.Error(), "its certificate is that of a worker, and nothing was sent") {
		t.Errorf("etcd members of a worker: %v", err)
	}
	if _, err := c.TryGbctl("-n", worker.Name, "apply-config", "-f", c.Configuration(control.Name)); err == nil || !strings.Contains(err.Error(), "and keys of the cluster are for control planes only") {
		t.Errorf("the configuration of a control plane for a worker: %v", err)
	}
	person := c.Gbctl("-n", control.Name, "kubeconfig", "--user", "jo", "-")
	path := t.TempDir() + "/kubeconfig"
	if err := os.WriteFile(path, []byte(person), 0o600); err != nil {
		t.Fatal(err)
	}
	server := fmt.Sprintf("--server=https://127.0.0.1:%d", c.KubernetesPort)
	if _, err := c.Try("--kubeconfig", path, server, "get", "nodes"); err != nil {
		t.Errorf("a person's access: %v", err)
	}
	c.Kubectl("patch", "clusterrolebinding", "garboard-administrators", "--type", "merge", "-p", `{"subjects": []}`)
	c.Eventually(attackBudget, "the person has no access any more", func() error {
		if _, err := c.Try("--kubeconfig", path, server, "get", "nodes"); err == nil || !strings.Contains(err.Error(), "Forbidden") {
			return fmt.Errorf("it says %v", err)
		}
		return nil
	})
}

// strange: trustd signs nothing for who has a token that has ended.
func strange(t *testing.T, c *e2etest.Cluster, control qemu.Node, token string) {
	t.Helper()
	if _, err := signed(t, c, control, token, "too-late"); connect.CodeOf(err) != connect.CodeUnauthenticated {
		t.Errorf("trustd, with a token that has ended: %v", err)
	}
}

// refused: the API server doesn't know who asks.
func refused(err error) error {
	if err == nil || !strings.Contains(err.Error(), "Unauthorized") {
		return fmt.Errorf("it says %v", err)
	}
	return nil
}
