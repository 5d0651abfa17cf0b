package config

import (
	"cmp"
	"encoding/base64"
	"fmt"
	"time"

	"github.com/garboard-os/garboard/config/pki"
	"gopkg.in/yaml.v3"
)

const (
	// adminValidity is how long the access of the group system:masters lasts, and the most of
	// any access. No certificate can be revoked, and one command makes a new one.
	adminValidity = 365 * 24 * time.Hour
	// namedValidity is the default for a person: somebody who leaves loses the access in a day.
	namedValidity = 24 * time.Hour
	mastersGroup  = "system:masters"
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

// Complete adds the defaults, and checks the validity.
func (a Access) Complete() (Access, error) {
	validity := namedValidity
	switch {
	case a.User == "" && len(a.Groups) == 0:
		a.Groups, validity = []string{mastersGroup}, adminValidity
	case len(a.Groups) == 0:
		a.Groups = []string{AdministratorsGroup}
	}
	a.User, a.Validity = cmp.Or(a.User, "admin"), cmp.Or(a.Validity, validity)
	if a.Validity < time.Minute || a.Validity > adminValidity {
		return a, fmt.Errorf("an access for %s: it must be from %s to %s, because it can't be revoked", a.Validity, time.Minute, adminValidity)
	}
	return a, nil
}

// Kubeconfig makes a self-contained one for a complete access to the Kubernetes at server (a
// URL). trusted are the authorities of the server.
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
	text, err = yaml.Marshal(KubeconfigOf(cluster, map[string]any{"certificate-authority-data": b64(trusted), "server": server},
		user, map[string]any{"client-certificate-data": b64(crt), "client-key-data": b64(key)}))
	return text, cert.NotAfter, err
}

// KubeconfigOf is a kubeconfig with one cluster and one user.
func KubeconfigOf(cluster string, at map[string]any, user string, with map[string]any) map[string]any {
	return map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": user,
		"clusters": []any{map[string]any{"name": cluster, "cluster": at}},
		"users":    []any{map[string]any{"name": user, "user": with}},
		"contexts": []any{map[string]any{"name": user, "context": map[string]any{"cluster": cluster, "user": user}}},
	}
}
