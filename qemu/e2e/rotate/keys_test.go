//go:build e2e && long

package rotate

import (
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

// The key of Secrets in etcd and the tokens with which nodes join are replaced: Secrets are there, the former tokens
// join nobody, and the worker, which has them still, gets its next certificate of the machine API without them.
func TestRotateKeys(t *testing.T) {
	c, m := e2etest.Ready(t, "rotatekeys", qemu.Container, e2etest.Nodes(1, 1))
	c.Healthy()
	control, worker := c.Nodes[0].Address.String(), c.Nodes[1].Address.String()
	c.Kubectl("-n", "default", "create", "secret", "generic", "kept", "--from-literal=k=v")
	before := secretsOf(t, c, control)
	if err := whoami(t, c, before.BootstrapToken); err != nil {
		t.Fatalf("before: %v", err)
	}
	t.Log(c.Patient(rotateBudget).Gbctl("-n", control, "rotate-ca", "--encryption", "--join-tokens", "-y"))
	m.Reached("keys rotated")
	after := secretsOf(t, c, control)
	if after.ClusterSecret == before.ClusterSecret || after.BootstrapToken == before.BootstrapToken || after.MachineToken == before.MachineToken {
		t.Error("a secret is the old one")
	}
	if text := c.Gbctl("-n", control, "config", "show"); strings.Contains(text, "acceptedSecrets") {
		t.Error("the former key is still accepted")
	}
	kept := func(when string) {
		t.Helper()
		c.Eventually(writeBudget, "the Secret is read, "+when, func() error {
			got, err := c.Try("-n", "default", "get", "secret", "kept", "-o", "jsonpath={.data.k}")
			if err == nil && got != "dg==" {
				err = fmt.Errorf("it is %q", got)
			}
			return err
		})
		c.Kubectl("get", "secrets", "-A")
	}
	kept("after the rotation")
	if err := whoami(t, c, before.BootstrapToken); err == nil || !strings.Contains(err.Error(), "Unauthorized") {
		t.Errorf("with the former token: %v", err)
	}
	c.Eventually(refuseBudget, "the new token joins", func() error { return whoami(t, c, after.BootstrapToken) })

	// Another authority of the machine API: the worker asks for a certificate of it, with another key.
	if text := c.Gbctl("-n", worker, "config", "show"); !strings.Contains(text, string(before.MachineToken)) {
		t.Error("the worker doesn't have the former token any more, and shows nothing")
	}
	t.Log(c.Patient(rotateBudget).Gbctl("-n", control, "rotate-ca", "--machine", "-y"))
	m.Reached("authority rotated")
	c.Gbctl("-n", worker, "version")
	c.Gbctl("-n", control, "reboot", "--wait")
	kept("after a boot")
	c.Eventually(writeBudget, "all nodes are ready", func() error { return c.NodesReady(c.Nodes...) })
}

// secretsOf are those of a control plane now.
func secretsOf(t *testing.T, c *e2etest.Cluster, node string) *config.Secrets {
	t.Helper()
	s, err := config.LoadSecrets(node, []byte(c.Gbctl("-n", node, "config", "show")))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// whoami asks the API server with a token.
func whoami(t *testing.T, c *e2etest.Cluster, token config.Secret) error {
	t.Helper()
	text := fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: a, contexts: [{name: a, context: {cluster: a, user: a}}],
users: [{name: a, user: {token: %q}}], clusters: [{name: a, cluster: {server: "https://127.0.0.1:%d", certificate-authority-data: %q}}]}
`, string(token), c.KubernetesPort, base64.StdEncoding.EncodeToString(c.Secrets().KubernetesCA.Crt))
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := c.Try("--kubeconfig", path, "auth", "whoami")
	return err
}
