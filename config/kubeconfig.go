package config

import (
	"encoding/base64"
	"fmt"
	"time"

	"github.com/garboard-os/garboard/config/pki"
	"gopkg.in/yaml.v3"
)

// adminValidity is how long an administrator's access to Kubernetes lasts: it
// can't be taken back, and getting another one is a command.
const adminValidity = 365 * 24 * time.Hour

// kubeconfigFile is the form of a kubeconfig, in the order in which kubectl
// writes it.
type kubeconfigFile struct {
	APIVersion     string           `yaml:"apiVersion"`
	Kind           string           `yaml:"kind"`
	Clusters       []map[string]any `yaml:"clusters"`
	Users          []map[string]any `yaml:"users"`
	Contexts       []map[string]any `yaml:"contexts"`
	CurrentContext string           `yaml:"current-context"`
}

// AdminKubeconfig makes a kubeconfig, with everything inside, for an
// administrator of the Kubernetes at server (a URL): "system:masters" passes all
// checks, also before any role exists.
func AdminKubeconfig(cluster, server string, ca pki.CA, now time.Time) (text []byte, expires time.Time, err error) {
	crt, key, err := ca.Issue(pki.Leaf{CN: "admin", Orgs: []string{"system:masters"}, Client: true, Validity: adminValidity, Now: now})
	if err != nil {
		return nil, expires, fmt.Errorf("make kubeconfig of %s: %w", cluster, err)
	}
	cert, err := pki.ParseCert(crt)
	if err != nil {
		return nil, expires, fmt.Errorf("make kubeconfig of %s: %w", cluster, err)
	}
	b64 := base64.StdEncoding.EncodeToString
	user := "admin@" + cluster
	text, err = yaml.Marshal(kubeconfigFile{
		APIVersion: "v1",
		Kind:       "Config",
		Clusters: []map[string]any{{"name": cluster, "cluster": map[string]string{
			"server": server, "certificate-authority-data": b64(ca.Cert),
		}}},
		Users: []map[string]any{{"name": user, "user": map[string]string{
			"client-certificate-data": b64(crt), "client-key-data": b64(key),
		}}},
		Contexts:       []map[string]any{{"name": user, "context": map[string]string{"cluster": cluster, "user": user}}},
		CurrentContext: user,
	})
	return text, cert.NotAfter, err
}
