//go:build e2e

package worker

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/vishvananda/netlink"
)

const (
	attackBudget = 30 * time.Second // for a control plane to decide
	taintBudget  = 30 * time.Second // for it to look at the taints of workers, each 5 s
	trustPort    = "50001"
	leave        = `{"metadata":{"annotations":{"garboard.dev/leaving":"reset-1"}}}`
)

// stranger is the address of a machine in the nodes' network.
var stranger = netip.MustParseAddr("10.5.0.66")

// taken: whoever has all that is on a worker stays that worker. Beside each attack is the use
// that goes on.
func taken(t *testing.T, c *e2etest.Cluster, control, worker qemu.Node) {
	secrets, fresh := c.Secrets(), "fresh-for-"+control.Name
	t.Run("client certificates", func(t *testing.T) {
		c := c.In(t)
		thief := bearer(t, c, string(secrets.BootstrapToken))
		for name, want := range map[string]string{control.Name: "one of the control planes'", worker.Name: "belongs to a machine that signs", fresh: "isn't signed with the key of a certificate of the machine API"} {
			requested(t, c, thief, control.Name+"-attacks-"+name, name, config.CertKey{})
			decided(c, control.Name+"-attacks-"+name, "Denied the ", want)
		}
	})
	t.Run("a fresh name", func(t *testing.T) { claimed(t, c.In(t), control) })
	t.Run("certificates of the machine API", func(t *testing.T) {
		c := c.In(t)
		for name, want := range map[string]string{control.Name: "one of the control planes'", worker.Name: "belongs to a machine with another key", fresh: ""} {
			crt, err := signed(t, c, control, string(secrets.MachineToken), name)
			if want != "" && (err == nil || !strings.Contains(err.Error(), want)) || want == "" && err != nil {
				t.Errorf("%s: %s, %v; want %q", name, crt, err, want)
			}
		}
	})
	t.Run("the account of flannel", func(t *testing.T) {
		c := c.In(t)
		pod := c.Kubectl("-n", "kube-system", "get", "pods", "-l", "k8s-app=flannel", "--field-selector", "spec.nodeName="+worker.Name, "-o", "jsonpath={.items[0].metadata.name}")
		token := c.Kubectl("-n", "kube-system", "create", "token", "flannel", "--bound-object-kind", "Pod", "--bound-object-name", pod)
		patch := func(node, patch string) error { return patchStatus(t, c, strings.TrimSpace(token), node, patch) }
		for what, attack := range map[string][2]string{
			"the address of a control plane": {control.Name, `{"status":{"addresses":[{"type":"InternalIP","address":"10.5.0.66"}]}}`},
			"the way to another node's pods": {control.Name, `{"metadata":{"annotations":{"flannel.alpha.coreos.com/public-ip":"10.5.0.66"}}}`},
			"the end of another node":        {control.Name, leave},
			"the end of its own node":        {worker.Name, leave},
			"a restricted label":             {worker.Name, `{"metadata":{"labels":{"node-restriction.kubernetes.io/a":"b"}}}`},
			"a role":                         {worker.Name, `{"metadata":{"labels":{"node-role.kubernetes.io/control-plane":""}}}`},
		} {
			if err := patch(attack[0], attack[1]); err == nil || !strings.Contains(err.Error(), "garboard-nodes") {
				t.Errorf("%s: %v", what, err)
			}
		}
		if err := patch(worker.Name, `{"metadata":{"annotations":{"flannel.alpha.coreos.com/test":"yes"}}}`); err != nil {
			t.Errorf("its own annotation: %v", err)
		}
	})
	if text, err := os.ReadFile(c.Configuration(worker.Name)); err != nil || strings.Contains(string(text), string(secrets.ClusterSecret)) {
		t.Errorf("the worker's configuration has the key of Secrets in etcd (%v)", err)
	}
}

// tainted: control planes keep the taints of a worker's configuration, and take no other ones away. What the Node says
// without a proof of the machine counts for nothing.
func tainted(t *testing.T, c *e2etest.Cluster, worker qemu.Node) {
	const kept, theirs = "example.org/kept", "example.org/theirs"
	patch := func(text string) { c.Gbctl("-n", worker.Name, "patch", "mc", "--immediate", "-p", text) }
	has := func(what string, budget time.Duration, want string) {
		t.Helper()
		c.Eventually(budget, what, func() error {
			out, err := c.Try("get", "node", worker.Name, "-o", `jsonpath={range .spec.taints[*]}{.key}={.value}:{.effect} {end}`)
			if err == nil && strings.TrimSpace(out) != want {
				err = fmt.Errorf("it has %q", out)
			}
			return err
		})
	}
	c.Kubectl("taint", "node", worker.Name, theirs+"=a:PreferNoSchedule")
	patch(`{"machine": {"kubelet": {"nodeTaints": {"example.org/kept": "yes:PreferNoSchedule"}}}}`)
	const both = theirs + "=a:PreferNoSchedule " + kept + "=yes:PreferNoSchedule"
	has("the worker has the taint of its configuration", taintBudget, both)
	c.Kubectl("annotate", "node", worker.Name, "--overwrite", "garboard.dev/wanted-taints={}")
	c.Kubectl("taint", "node", worker.Name, kept+"-")
	has("it has the taint again", taintBudget+time.Minute, both) // the worker asks again, too
	patch(`[{"op": "remove", "path": "/machine/kubelet/nodeTaints"}]`)
	has("it has only the administrator's", taintBudget, theirs+"=a:PreferNoSchedule")
	c.Kubectl("taint", "node", worker.Name, theirs+"-")
}

// claimed: a thief who has both tokens takes a name that no machine has yet. That is a join: the machine that comes
// later is told that its name is taken, by whom, and what to do. When the administrator has freed the name, it belongs
// to the key of that machine, and the thief's certificate, which nobody can take back, isn't renewed.
func claimed(t *testing.T, c *e2etest.Cluster, control qemu.Node) {
	secrets := c.Secrets()
	join := bearer(t, c, string(secrets.BootstrapToken))
	thief := machine(t, c, control, string(secrets.MachineToken), "claimed")
	kubelet := requested(t, c, join, control.Name+"-claims", "claimed", thief)
	decided(c, control.Name+"-claims", "Approved ", "")
	_, err := signed(t, c, control, string(secrets.MachineToken), "claimed")
	if err == nil || !strings.Contains(err.Error(), "the name claimed belongs to a machine with another key, at "+stranger.String()) || !strings.Contains(err.Error(), "gbctl token revoke node/claimed") {
		t.Errorf("the second machine: %v", err)
	}
	requested(t, c, join, control.Name+"-late", "claimed", config.CertKey{})
	decided(c, control.Name+"-late", "Denied the name claimed belongs to a machine that signs", "gbctl token revoke node/claimed")
	if list := c.Gbctl("-n", control.Name, "token", "list"); !e2etest.Row(list, "node/claimed", "never", stranger.String()) {
		t.Errorf("the list doesn't show who has the name:\n%s", list)
	}
	issued := func() (crt []byte) {
		c.Eventually(attackBudget, "the certificate is signed", func() error {
			text, err := c.Try("get", "csr", control.Name+"-claims", "-o", "jsonpath={.status.certificate}")
			if err == nil && text == "" {
				err = errors.New("not yet")
			}
			if err == nil {
				crt, err = base64.StdEncoding.DecodeString(text)
			}
			return err
		})
		return crt
	}
	node := access(t, c, fmt.Sprintf("client-certificate-data: %q, client-key-data: %q", base64.StdEncoding.EncodeToString(issued()), base64.StdEncoding.EncodeToString(kubelet)))
	requested(t, c, node, control.Name+"-renews", "claimed", thief)
	decided(c, control.Name+"-renews", "Approved ", "")

	c.Gbctl("-n", control.Name, "token", "revoke", "node/claimed")
	owner := machine(t, c, control, string(secrets.MachineToken), "claimed")
	requested(t, c, node, control.Name+"-silent", "claimed", config.CertKey{}) // as a kubelet renews by itself
	requested(t, c, node, control.Name+"-again", "claimed", thief)
	decided(c, control.Name+"-again", "Denied the name claimed belongs to a machine with another key", "")
	requested(t, c, join, control.Name+"-owner", "claimed", owner)
	decided(c, control.Name+"-owner", "Approved ", "")
	if got := c.Kubectl("get", "csr", control.Name+"-silent", "-o", "jsonpath={.status.conditions}"); got != "" {
		t.Errorf("the thief's kubelet has its certificate renewed: %s", got)
	}
	c.Gbctl("-n", control.Name, "token", "revoke", "node/claimed")
}

// machine is what trustd gives a machine with a new key.
func machine(t *testing.T, c *e2etest.Cluster, control qemu.Node, token, name string) config.CertKey {
	t.Helper()
	key, err := pki.NewKey(pki.Ed25519)
	if err != nil {
		t.Fatal(err)
	}
	crt, err := signedFor(t, c, control, token, name, key)
	if err != nil {
		t.Fatal(err)
	}
	return config.CertKey{Crt: crt, Key: key}
}

// decided waits for the decision about a request.
func decided(c *e2etest.Cluster, request, want, words string) {
	c.T().Helper()
	c.Eventually(attackBudget, "a decision about "+request, func() error {
		got, err := c.Try("get", "csr", request, "-o", "jsonpath={.status.conditions[0].type} {.status.conditions[0].message}")
		if err == nil && (!strings.HasPrefix(got, want) || !strings.Contains(got, words)) {
			err = fmt.Errorf("it is %q, want %s, %s", got, want, words)
		}
		return err
	})
}

// bearer is a kubeconfig with a token.
func bearer(t *testing.T, c *e2etest.Cluster, token string) string {
	t.Helper()
	return access(t, c, fmt.Sprintf("token: %q", token))
}

// access is a kubeconfig of a user.
func access(t *testing.T, c *e2etest.Cluster, user string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: a, contexts: [{name: a, context: {cluster: a, user: a}}],
users: [{name: a, user: {%s}}], clusters: [{name: a, cluster: {server: "https://127.0.0.1:%d", certificate-authority-data: %q}}]}
`, user, c.KubernetesPort, base64.StdEncoding.EncodeToString(c.Secrets().KubernetesCA.Crt))
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// patchStatus changes the status of a Node, as who has a token. kubectl would also read it, which flannel may not.
func patchStatus(t *testing.T, c *e2etest.Cluster, token, node, patch string) error {
	t.Helper()
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(c.Secrets().KubernetesCA.Crt)
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPatch, fmt.Sprintf("https://127.0.0.1:%d/api/v1/nodes/%s/status", c.KubernetesPort, node), strings.NewReader(patch))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+token)
	r.Header.Set("Content-Type", "application/merge-patch+json")
	client := &http.Client{Timeout: attackBudget, Transport: &http.Transport{TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots}, DisableKeepAlives: true}}
	answer, err := client.Do(r)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", answer.Status, text)
	}
	return err
}

// requested asks for the client certificate of a node, with the proof of a machine if it has a certificate. It returns
// the key.
func requested(t *testing.T, c *e2etest.Cluster, kubeconfig, csr, name string, by config.CertKey) config.KeyPEM {
	t.Helper()
	key, err := pki.NewKey(pki.ECDSA)
	if err != nil {
		t.Fatal(err)
	}
	text := request(t, key, pki.Leaf{CN: config.NodeUser + name, Orgs: []string{"system:nodes"}})
	annotations := map[string]string{}
	if block, _ := pem.Decode(text); len(by.Crt) > 0 {
		proof, err := pki.Prove(by.Crt, by.Key, "client certificate of a kubelet", block.Bytes)
		if err != nil {
			t.Fatal(err)
		}
		annotations["garboard.dev/proof"] = string(proof)
	}
	object, err := json.Marshal(map[string]any{
		"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest", "metadata": map[string]any{"name": csr, "annotations": annotations},
		"spec": map[string]any{"signerName": "kubernetes.io/kube-apiserver-client-kubelet", "usages": []string{"digital signature", "client auth"}, "request": text},
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.TryWith(string(object), "--kubeconfig", kubeconfig, "create", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	return key
}

func request(t *testing.T, key config.KeyPEM, leaf pki.Leaf) []byte {
	t.Helper()
	text, err := pki.NewRequest(key, leaf)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// signed asks trustd for a certificate for a name, with a new key, as a machine in the nodes' network.
func signed(t *testing.T, c *e2etest.Cluster, control qemu.Node, token, name string) ([]byte, error) {
	t.Helper()
	key, err := pki.NewKey(pki.Ed25519)
	if err != nil {
		t.Fatal(err)
	}
	return signedFor(t, c, control, token, name, key)
}

// signedFor is signed for a key.
func signedFor(t *testing.T, c *e2etest.Cluster, control qemu.Node, token, name string, key config.KeyPEM) ([]byte, error) {
	t.Helper()
	inside, at := c.Network(), net.JoinHostPort(control.Address.String(), trustPort)
	err := inside.Do(func() error {
		link, err := netlink.LinkByName("nodes")
		if err == nil {
			err = netlink.AddrReplace(link, &netlink.Addr{IPNet: &net.IPNet{IP: stranger.AsSlice(), Mask: net.CIDRMask(32, 32)}})
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(c.Secrets().MachineCA.Crt)
	transport := &http.Transport{
		TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: roots}, DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, address string) (conn net.Conn, err error) {
			from := net.Dialer{LocalAddr: &net.TCPAddr{IP: stranger.AsSlice()}}
			err = inside.Do(func() (err error) { conn, err = from.DialContext(ctx, "tcp", address); return err })
			return conn, err
		},
	}
	client := garboardv1connect.NewTrustServiceClient(&http.Client{Transport: transport, Timeout: attackBudget}, "https://"+at)
	answer, err := client.Sign(t.Context(), connect.NewRequest(&apiv1.SignRequest{Token: token, Request: request(t, key, pki.Leaf{CN: name, DNS: []string{name}, IPs: []netip.Addr{stranger}})}))
	if err != nil {
		return nil, err
	}
	return answer.Msg.GetCertificate(), nil
}
