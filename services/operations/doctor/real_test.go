//go:build e2e

package doctor

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/garboard-os/garboard/tools/testing/freeport"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// componentsVar is a list like PATH of the folders with etcd and Kubernetes'
// programs. `make e2e` sets it once they are built.
const componentsVar = "GARBOARD_COMPONENTS"

const (
	// refuseBudget is for a program to look at its command line.
	refuseBudget = 10 * time.Second
	// fullBudget is for an etcd to begin, and to take all that its quota allows.
	fullBudget = 30 * time.Second
	// quota of that etcd's database, which is full after some of these values.
	quota     = 4 << 20
	fillValue = 256 << 10
)

func program(t *testing.T, name string) string {
	t.Helper()
	for _, dir := range filepath.SplitList(os.Getenv(componentsVar)) {
		if info, err := os.Stat(filepath.Join(dir, name)); err == nil && info.Mode()&0o111 != 0 {
			return filepath.Join(dir, name)
		}
	}
	t.Fatalf("%s is in none of the folders of %s=%q", name, componentsVar, os.Getenv(componentsVar))
	return ""
}

// What the real programs say of a wrong argument is understood, also in the releases
// to come.
func TestRealProgramsRefuse(t *testing.T) {
	refuse := func(name, flag, value string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), eventually.Scale(refuseBudget))
		defer cancel()
		out, err := exec.CommandContext(ctx, program(t, name), "--"+flag+"="+value).CombinedOutput()
		if err == nil || ctx.Err() != nil {
			t.Errorf("%s took --%s=%s: %v", name, flag, value, err)
			return
		}
		words := lastError(strings.Split(string(out), "\n"))
		if got := wrongFlag(words); got != flag {
			t.Errorf("%s: the last words are %q, which blames %q", name, words, got)
		}
	}
	for _, name := range []string{"etcd", "kubelet", apiServer, controllerManager, scheduler} {
		refuse(name, "no-such-flag", "1")
	}
	refuse("etcd", "heartbeat-interval", "abc")
	refuse("kubelet", "max-pods", "abc")
	refuse(apiServer, "secure-port", "abc")
	refuse(scheduler, "leader-elect", "perhaps")
}

// A real member that has raised its alarm is found out.
func TestRealEtcdNoSpace(t *testing.T) {
	n := start(t, config.Init, func(n *node, _ map[string]*dag.Service) { n.etcd.client = realEtcd(n) })
	n.healthy()
	client := n.etcdClient(n.etcd.client)
	value := strings.Repeat("x", fillValue)
	eventually.That(t, fullBudget, "the database to be full", func() error {
		ctx, cancel := context.WithTimeout(t.Context(), askTimeout)
		defer cancel()
		_, err := client.Put(ctx, "fill", value)
		if errors.Is(err, rpctypes.ErrNoSpace) {
			return nil
		}
		return fmt.Errorf("it takes one more: %w", err)
	})
	n.finds("etcd-no-space", failure, "NOSPACE", "quota-backend-bytes")
}

// realEtcd runs until the test ends, with a quota of a few MB.
func realEtcd(n *node) (url string) {
	ca, dir := n.config.Cluster.Etcd.CA, n.t.TempDir()
	crt, key, err := ca.CA().Issue(pki.Leaf{CN: nodeName, Server: true, Client: true, IPs: []netip.Addr{netip.MustParseAddr("127.0.0.1")}, Now: time.Now()})
	n.must(err)
	for name, data := range map[string][]byte{"ca.crt": ca.Crt, "tls.crt": crt, "tls.key": key} {
		n.must(os.WriteFile(filepath.Join(dir, name), data, 0o600))
	}
	url, peer := "https://"+freeport.Find(n.t).String(), "http://"+freeport.Find(n.t).String()
	output, err := os.Create(filepath.Join(dir, "log"))
	n.must(err)
	server := exec.Command(program(n.t, "etcd"), "--data-dir="+filepath.Join(dir, "data"), "--unsafe-no-fsync", fmt.Sprintf("--quota-backend-bytes=%d", quota),
		"--listen-client-urls="+url, "--advertise-client-urls="+url, "--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer, "--initial-cluster=default="+peer,
		"--client-cert-auth", "--trusted-ca-file="+filepath.Join(dir, "ca.crt"), "--cert-file="+filepath.Join(dir, "tls.crt"), "--key-file="+filepath.Join(dir, "tls.key"))
	server.Stdout, server.Stderr = output, output
	server.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	n.must(server.Start())
	n.t.Cleanup(func() {
		_ = server.Process.Kill()
		_ = server.Wait()
		output.Close()
		if text, _ := os.ReadFile(output.Name()); n.t.Failed() {
			n.t.Logf("etcd said:\n%s", text[max(0, len(text)-4000):])
		}
	})
	return url
}

// etcdClient is a client like that of the node's own programs.
func (n *node) etcdClient(url string) *clientv3.Client {
	c, err := etcd.Dial(context.Background(), n.store, url)
	n.must(err)
	n.t.Cleanup(func() { c.Close() })
	return c
}
