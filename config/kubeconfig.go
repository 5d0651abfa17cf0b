package config

import (
	"time"

	"github.com/garboard-os/garboard/config/pki"
)

// Kubeconfig has the fields that Access.Kubeconfig sets. kubectl knows more fields. PID 1 reads
// none.
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
// Kubernetes at server (a URL). trusted are the authorities of the server.
func AdminKubeconfig(cluster, server string, ca pki.CA, trusted PEM, now time.Time) (text []byte, expires time.Time, err error) {
	who, _ := Access{}.Complete() // its own defaults
	return who.Kubeconfig(cluster, server, ca, trusted, now)
}
