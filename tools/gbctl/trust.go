package main

import (
	"context"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"
)

// trusted returns a client for a node to which secrets, what, are about to be sent. Without
// --fingerprint, a machine in maintenance mode first shows its certificate. All later
// connections must present the same one.
func (a *app) trusted(ctx context.Context, c *client.Client, what string) (*client.Client, error) {
	if !a.insecure || a.fingerprint != "" {
		return c, nil
	}
	if _, err := client.Unary(ctx, c.Node.Version, &apiv1.VersionRequest{}); err != nil {
		return nil, err
	}
	shown := c.Shown()
	a.warn(c.Name, shown)
	if interactive(a.in) { // scripts aren't asked
		if err := a.ask(ctx, "send "+what+" to this machine?"); err != nil {
			return nil, err
		}
	}
	who, err := a.access()
	if err != nil {
		return nil, err
	}
	trusted, err := client.DialMaintenance(who, c.Name, shown)
	return a.observed(trusted), err
}

// warn prints, once for each node, that the certificate of the node was not verified.
func (a *app) warn(node, shown string) {
	if _, twice := a.warned.LoadOrStore(node, true); twice {
		return
	}
	fmt.Fprintf(a.err, "%s %s presents the certificate %s, which isn't verified; compare it with the one on the node's console, or give that one with --fingerprint\n", painted(a.err, "warning:"), node, shown)
}

var errDeclined = errors.New("nothing was done: the answer isn't yes")

// ask asks a question on the terminal. Any answer but yes aborts.
func (a *app) ask(ctx context.Context, what string) error {
	answer, err := a.typed(ctx, what+" [yes/no]: ")
	if err == nil && answer != "yes" {
		err = errDeclined
	}
	return err
}

// typed is the line that the user types after a prompt.
func (a *app) typed(ctx context.Context, prompt string) (string, error) {
	_, lines := a.userInput()
	fmt.Fprint(a.err, prompt)
	select {
	case <-ctx.Done():
		return "", ctx.Err()
	case line := <-lines:
		return strings.TrimSpace(line), nil
	}
}

// forControlPlanes are the commands that send secrets of the cluster, ask for them, or
// believe what the node says about the cluster.
var forControlPlanes = []string{"bootstrap", "config renew", "convert-k8s", "etcd", "kubeconfig", "readdress", "rotate-ca", "set-endpoint", "token", "upgrade-k8s"}

func isForControlPlanes(cmd *cobra.Command) bool {
	return slices.ContainsFunc(forControlPlanes, func(name string) bool { return strings.HasPrefix(pathOf(cmd)+" ", name+" ") })
}

// errWorker: the node's certificate is that of a worker, where a control plane is needed.
var errWorker = errors.New("its certificate is that of a worker")

// noWorker makes a client refuse workers before it sends anything. Whoever has taken a
// worker over has its certificate, and may answer in the place of another node.
func noWorker(c *client.Client, format string, args ...any) {
	c.Accepts = func(cert *x509.Certificate) error {
		if pki.IsWorker(cert) {
			return fmt.Errorf("%w, and nothing was sent: %s", errWorker, fmt.Sprintf(format, args...))
		}
		return nil
	}
}

// ofCluster is where a configuration has keys of the cluster. Other keys are for nodes of all types.
var ofCluster = regexp.MustCompile(`^\.(machine|cluster|cluster\.etcd)\.(ca|acceptedCAs|aggregatorCA|acceptedAggregatorCAs|serviceAccount)\b`)

// givenKey is where a document has a key of the cluster that its receiver may lack: it isn't
// in the document that the receiver has sent before. Workers need none, but those of earlier
// releases have cluster.secret, also in the files of their users.
func givenKey(text []byte, current *apiv1.GetConfigResponse) string {
	had, keys := map[string]string{}, map[string]string{}
	var sent, received any
	if yaml.Unmarshal(current.GetDocument(), &received) == nil {
		findKeys(received, "", had)
	}
	if err := yaml.Unmarshal(text, &sent); err != nil {
		return fmt.Sprintf("what can't be read (%v)", err)
	}
	if findKeys(sent, "", keys); current == nil && keys[".machine.type"] == "worker" {
		delete(keys, ".cluster.secret")
	}
	delete(keys, ".machine.type")
	for at, key := range keys {
		if had[at] != key {
			return at[1:]
		}
	}
	return ""
}

// findKeys finds the private keys in a value, by path, and with them the machine's type.
func findKeys(v any, at string, found map[string]string) {
	switch v := v.(type) {
	case map[string]any:
		for key, c := range v {
			findKeys(c, at+"."+key, found)
		}
	case map[any]any: // has keys that no configuration has
		for key, c := range v {
			findKeys(c, fmt.Sprint(at, ".", key), found)
		}
	case []any:
		for i, c := range v {
			findKeys(c, fmt.Sprintf("%s[%d]", at, i), found)
		}
	case string:
		value := strings.Join(strings.Fields(v), "")
		text, _ := base64.StdEncoding.DecodeString(value)
		if at == ".machine.type" || at == ".cluster.secret" || strings.HasPrefix(at, ".cluster.acceptedSecrets") || ofCluster.MatchString(at) && strings.Contains(v+string(text), "PRIVATE KEY-----") {
			found[at] = value
		}
	}
}
