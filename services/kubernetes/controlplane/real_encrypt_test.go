//go:build e2e

package controlplane

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// A real API server reads with each key, and etcd has all Secrets with another one after EncryptAgain: then the API
// server needs the former one no more, and with the former one alone it reads nothing. All of it can be taken back.
func TestRealEncryptAgain(t *testing.T) {
	n := &realNode{t: t, dir: t.TempDir(), config: testConfig(t)}
	n.config.Cluster.Secret = config.NewKey32()
	n.prepare()
	n.runControllers()
	n.startEtcd()
	old, fresh := n.config.Cluster.Secret, config.NewKey32()
	// run starts the API server with these keys, the first of which writes.
	run := func(keys ...config.Secret) (stop func()) {
		t.Helper()
		c := *n.config
		c.Cluster.Secret, c.Cluster.AcceptedSecrets = keys[0], keys[1:]
		put(t, configuration.Configs.Put(n.store.As("test"), configuration.ConfigID, &c))
		eventually.That(t, 20*time.Second, "the files", func() error {
			o, err := secrets.Statuses.Get(n.store, secrets.KubernetesID)
			if err == nil && !o.Spec.Current(&c) {
				err = errors.New("they are of another configuration")
			}
			return err
		})
		return n.startProgram(apiServer)
	}
	serve := func(do func(*kubeclient.Client), keys ...config.Secret) {
		t.Helper()
		stop := run(keys...)
		do(n.admin())
		stop()
	}
	names := []string{"a", "b", "c"}
	readable := func(c *kubeclient.Client) {
		t.Helper()
		for _, name := range names {
			if o, err := c.Get(t.Context(), secretNamed(name).Ref()); err != nil || o.Text("data", "k") != "eA==" {
				t.Errorf("Secret %s: %v, %v", name, o["data"], err)
			}
		}
		_, err := c.List(t.Context(), kubeclient.Ref{APIVersion: "v1", Kind: "Secret"}, kubeclient.Selection{})
		put(t, err)
	}

	serve(func(c *kubeclient.Client) {
		for _, name := range names {
			_, err := c.Create(t.Context(), secretNamed(name))
			put(t, err)
		}
		immutable, err := c.Merge(t.Context(), secretNamed("c").Ref(), kubeclient.Object{"immutable": true})
		if put(t, err); immutable["immutable"] != true {
			t.Errorf("it is %v", immutable)
		}
	}, old)
	serve(readable, old, fresh)
	before := n.stored(names)
	again := func(c *kubeclient.Client) {
		t.Helper()
		readable(c)
		put(t, EncryptAgain(t.Context(), c))
		once := n.stored(names)
		put(t, EncryptAgain(t.Context(), c))
		if now := n.stored(names); !same(once, now) {
			t.Error("what was as it should be was written again")
		}
		readable(c)
	}
	serve(again, fresh, old)
	if after := n.stored(names); bytes.Equal(before[0], after[0]) || bytes.Equal(before[1], after[1]) || bytes.Equal(before[2], after[2]) {
		t.Error("a Secret is as it was")
	}
	// The twin: with the former key alone, the API server reads none of them, and isn't ready.
	stop := run(old)
	o, err := secrets.Kubernetes.Get(n.store, secrets.KubernetesID)
	put(t, err)
	client, err := kubeclient.New(throughBalancer(o.Spec))
	put(t, err)
	for _, name := range names {
		eventually.That(t, 60*time.Second, name+" can't be read", func() error {
			if _, err := client.Get(t.Context(), secretNamed(name).Ref()); err == nil || !strings.Contains(err.Error(), "encryption") {
				return fmt.Errorf("it says %v", err)
			}
			return nil
		})
	}
	if err := client.Ready(t.Context()); err == nil {
		t.Error("the API server is ready")
	}
	client.Close()
	stop()
	serve(again, old, fresh) // it is taken back
	serve(readable, old)
	serve(again, fresh, old)
	serve(readable, fresh)
}

func secretNamed(name string) kubeclient.Object {
	return kubeclient.Object{
		"apiVersion": "v1", "kind": "Secret", "metadata": object{"name": name, "namespace": "default"}, "stringData": object{"k": "x"},
	}
}

// stored are Secrets as etcd has them.
func (n *realNode) stored(names []string) (all [][]byte) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), 10*time.Second)
	defer cancel()
	client, err := etcd.Dial(ctx, n.store, n.etcdURL)
	put(n.t, err)
	defer client.Close()
	for _, name := range names {
		found, err := client.Get(ctx, "/registry/secrets/default/"+name, clientv3.WithLimit(1))
		put(n.t, err)
		if len(found.Kvs) != 1 || !bytes.HasPrefix(found.Kvs[0].Value, []byte("k8s:enc:secretbox:v1:key1:")) {
			n.t.Fatalf("%s is %v in etcd", name, found.Kvs)
		}
		all = append(all, found.Kvs[0].Value)
	}
	return all
}

func same(a, b [][]byte) bool {
	for i := range a {
		if !bytes.Equal(a[i], b[i]) {
			return false
		}
	}
	return len(a) == len(b)
}
