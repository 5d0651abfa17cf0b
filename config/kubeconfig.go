package config

import (
	"cmp"
	"encoding/base64"
	"fmt"
	"strings"
	"time"
	"unicode"

	"github.com/garboard-os/garboard/config/pki"
	"gopkg.in/yaml.v3"
)

const (
	// adminValidity is how long the access of the group system:masters lasts, and the most of
	// any access. No certificate can be revoked, and one command makes a new one.
	adminValidity = 365 * 24 * time.Hour
	// namedValidity is the default for a person: somebody who leaves loses the access in a day.
	namedValidity = 24 * time.Hour
	minValidity   = time.Minute
	// maxAccessName is of common names and of organisations (RFC 5280, A.1).
	maxAccessName = 64

	mastersGroup = "system:masters"
	// AdministratorsGroup has all rights by a binding, which can be changed (bootstrap manifest
	// 02-administrators).
	AdministratorsGroup = "garboard:administrators"
)

// Access is who gets a kubeconfig. The zero value is the administrator of a cluster without
// working roles: the group "system:masters" passes all authorization checks, also before any
// role exists, and no role takes that back.
type Access struct {
	User     string
	Groups   []string
	Validity time.Duration
}

// Complete adds the defaults, and checks the names and the validity.
func (a Access) Complete() (Access, error) {
	validity := namedValidity
	switch {
	case a.User == "" && len(a.Groups) == 0:
		a.Groups, validity = []string{mastersGroup}, adminValidity
	case len(a.Groups) == 0:
		a.Groups = []string{AdministratorsGroup}
	}
	a.User, a.Validity = cmp.Or(a.User, "admin"), cmp.Or(a.Validity, validity)
	for _, name := range append([]string{a.User}, a.Groups...) {
		if name == "" || len(name) > maxAccessName || strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) }) {
			return a, fmt.Errorf("%q can't be the name of a user or a group: it must have 1 to %d printable bytes", name, maxAccessName)
		}
	}
	if a.Validity < minValidity || a.Validity > adminValidity {
		return a, fmt.Errorf("an access for %s: it must be from %s to %s, because it can't be revoked", a.Validity, minValidity, adminValidity)
	}
	return a, nil
}

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
// Kubernetes at server (a URL). trusted are the authorities of the server.
func AdminKubeconfig(cluster, server string, ca pki.CA, trusted PEM, now time.Time) (text []byte, expires time.Time, err error) {
	who, _ := Access{}.Complete() // its own defaults
	return who.Kubeconfig(cluster, server, ca, trusted, now)
}

// Kubeconfig makes one for a complete access.
func (a Access) Kubeconfig(cluster, server string, ca pki.CA, trusted PEM, now time.Time) (text []byte, expires time.Time, err error) {
	crt, key, err := ca.Issue(pki.Leaf{CN: a.User, Orgs: a.Groups, Client: true, Validity: a.Validity, Now: now})
	if err != nil {
		return nil, expires, fmt.Errorf("make kubeconfig of %s: %w", cluster, err)
	}
	cert, err := pki.ParseCert(crt)
	if err != nil {
		return nil, expires, err
	}
	b64 := base64.StdEncoding.EncodeToString
	user := a.User + "@" + cluster
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
