//go:build e2e

package worker

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
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
	trustPort    = "50001"
	leave        = `{"metadata":{"annotations":{"garboard.dev/leaving":"reset-1"}}}`
)

// stranger is the address of a machine in the nodes' network.
var stranger = netip.MustParseAddr("10.5.0.66")

// taken: whoever has all that is on a worker stays that worker. Beside each attack is the use
// that goes on.
func taken(t *testing.T, c *e2etest.Cluster, control, worker qemu.Node) {
	secrets := c.Secrets()
	t.Run("client certificates", func(t *testing.T) {
		c := c.In(t)
		thief := bearer(t, c, string(secrets.BootstrapToken))
		for name, want := range map[string]string{control.Name: "Denied", worker.Name: "Denied", "fresh": "Approved"} {
			requested(t, c, thief, name)
			c.Eventually(attackBudget, "a decision about "+name, func() error {
				got, err := c.Try("get", "csr", "attack-"+name, "-o", "jsonpath={.status.conditions[0].type} {.status.conditions[0].message}")
				if err == nil && !strings.HasPrefix(got, want+" ") {
					err = fmt.Errorf("it is %q, want %s", got, want)
				}
				return err
			})
		}
	})
	t.Run("certificates of the machine API", func(t *testing.T) {
		c := c.In(t)
		for name, want := range map[string]string{control.Name: "one of the control planes'", worker.Name: "belongs to a machine with another key", "fresh": ""} {
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

// bearer is a kubeconfig with a token.
func bearer(t *testing.T, c *e2etest.Cluster, token string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: a, contexts: [{name: a, context: {cluster: a, user: a}}],
users: [{name: a, user: {token: %q}}], clusters: [{name: a, cluster: {server: "https://127.0.0.1:%d", certificate-authority-data: %q}}]}
`, token, c.KubernetesPort, base64.StdEncoding.EncodeToString(c.Secrets().KubernetesCA.Crt))
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

// requested asks for the client certificate of a node.
func requested(t *testing.T, c *e2etest.Cluster, kubeconfig, name string) {
	t.Helper()
	text := request(t, pki.Leaf{CN: config.NodeUser + name, Orgs: []string{"system:nodes"}})
	csr := fmt.Sprintf(`{apiVersion: certificates.k8s.io/v1, kind: CertificateSigningRequest, metadata: {name: attack-%s},
spec: {signerName: kubernetes.io/kube-apiserver-client-kubelet, usages: [digital signature, client auth], request: %s}}`, name, base64.StdEncoding.EncodeToString(text))
	if _, err := c.TryWith(csr, "--kubeconfig", kubeconfig, "create", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = c.Try("delete", "csr", "attack-"+name, "--wait=false") }) // it ends by itself, too
}

func request(t *testing.T, leaf pki.Leaf) []byte {
	t.Helper()
	key, err := pki.NewKey(pki.ECDSA)
	if err != nil {
		t.Fatal(err)
	}
	text, err := pki.NewRequest(key, leaf)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// signed asks trustd for a certificate for a name, with a new key, as a machine in the nodes' network.
func signed(t *testing.T, c *e2etest.Cluster, control qemu.Node, token, name string) ([]byte, error) {
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
	answer, err := client.Sign(t.Context(), connect.NewRequest(&apiv1.SignRequest{Token: token, Request: request(t, pki.Leaf{CN: name, DNS: []string{name}, IPs: []netip.Addr{stranger}})}))
	if err != nil {
		return nil, err
	}
	return answer.Msg.GetCertificate(), nil
}
