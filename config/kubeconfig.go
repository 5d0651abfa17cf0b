package config

import (
	"encoding/base64"
	"fmt"
	"time"

	"github.com/garboard-os/garboard/config/pki"
	"gopkg.in/yaml.v3"
)

// adminValidity is how long an administrator's access to Kubernetes lasts. It
// can't be revoked, and one command makes a new one.
const adminValidity = 365 * 24 * time.Hour

// Kubeconfig has the fields that AdminKubeconfig sets. kubectl knows more fields.
type Kubeconfig struct {
	APIVersion     string        `yaml:"apiVersion"`
	Kind           string        `yaml:"kind"`
	Clusters       []KubeCluster `yaml:"clusters"`
	Users          []KubeUser    `yaml:"users"`
	Contexts       []KubeContext `yaml:"contexts"`
	CurrentContext string        `yaml:"current-context"`
}

// KubeCluster is a cluster of a kubeconfig.
type KubeCluster struct {
	Cluster struct {
		CA     string `yaml:"certificate-authority-data"`
		Server string `yaml:"server"`
	} `yaml:"cluster"`
	Name string `yaml:"name"`
}

// KubeUser is a user of a kubeconfig.
type KubeUser struct {
	Name string `yaml:"name"`
	User struct {
		Crt string `yaml:"client-certificate-data"`
		Key string `yaml:"client-key-data"`
	} `yaml:"user"`
}

// KubeContext is a context of a kubeconfig.
type KubeContext struct {
	Context struct {
		Cluster   string `yaml:"cluster"`
		Namespace string `yaml:"namespace,omitempty"`
		User      string `yaml:"user"`
	} `yaml:"context"`
	Name string `yaml:"name"`
}

// AdminKubeconfig makes a self-contained kubeconfig for an administrator of the
// Kubernetes at server (a URL). The group "system:masters" passes all
// authorization checks, also before any role exists. trusted are the authorities of the server.
func AdminKubeconfig(cluster, server string, ca pki.CA, trusted PEM, now time.Time) (text []byte, expires time.Time, err error) {
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
	file := Kubeconfig{
		APIVersion: "v1", Kind: "Config", CurrentContext: user,
		Clusters: []KubeCluster{{Name: cluster}}, Users: []KubeUser{{Name: user}}, Contexts: []KubeContext{{Name: user}},
	}
	file.Clusters[0].Cluster.CA, file.Clusters[0].Cluster.Server = b64(trusted), server
	file.Users[0].User.Crt, file.Users[0].User.Key = b64(crt), b64(key)
	file.Contexts[0].Context.Cluster, file.Contexts[0].Context.User = cluster, user
	text, err = yaml.Marshal(file)
	return text, cert.NotAfter, err
}
