package config

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"slices"
	"strings"

	"github.com/garboard-os/garboard/config/pki"
)

// Authority is one of those that the nodes of a cluster have in common: one certificate
// that issues, and others that are accepted beside it.
type Authority struct {
	Name string
	// Issuing and Accepted are the paths of both fields.
	Issuing, Accepted []string
	// Workers have it, without a key.
	Workers bool
	// Of are both fields in a configuration.
	Of func(*Config) (issuing *CertKey, accepted *[]CertKey)
}

// Names of the authorities, and of the keys of service accounts and of Secrets in etcd, which are
// replaced in the same way.
const (
	MachineAuthority    = "machine"
	KubernetesAuthority = "kubernetes"
	AggregatorAuthority = "aggregator"
	EtcdAuthority       = "etcd"
	ServiceAccountKey   = "service-account"
	AtRestKey           = "encryption"
)

// Authorities are all authorities.
var Authorities = []Authority{
	{MachineAuthority, []string{"machine", "ca"}, []string{"machine", "acceptedCAs"}, true,
		func(c *Config) (*CertKey, *[]CertKey) { return &c.Machine.CA, &c.Machine.AcceptedCAs }},
	{KubernetesAuthority, []string{"cluster", "ca"}, []string{"cluster", "acceptedCAs"}, true,
		func(c *Config) (*CertKey, *[]CertKey) { return &c.Cluster.CA, &c.Cluster.AcceptedCAs }},
	{AggregatorAuthority, []string{"cluster", "aggregatorCA"}, []string{"cluster", "acceptedAggregatorCAs"}, false,
		func(c *Config) (*CertKey, *[]CertKey) {
			return &c.Cluster.AggregatorCA, &c.Cluster.AcceptedAggregatorCAs
		}},
	{EtcdAuthority, []string{"cluster", "etcd", "ca"}, []string{"cluster", "etcd", "acceptedCAs"}, false,
		func(c *Config) (*CertKey, *[]CertKey) { return &c.Cluster.Etcd.CA, &c.Cluster.Etcd.AcceptedCAs }},
}

// Trusted are the certificates of all authorities that are accepted. The text doesn't
// depend on which of them issues.
func Trusted(issuing CertKey, accepted []CertKey) PEM {
	all := [][]byte{issuing.Crt}
	for _, a := range accepted {
		all = append(all, a.Crt)
	}
	return bundle(all)
}

// TrustedCAs are the authorities of the machine API.
func (m *Machine) TrustedCAs() PEM { return Trusted(m.CA, m.AcceptedCAs) }

// TrustedCAs are the authorities of Kubernetes.
func (c *Cluster) TrustedCAs() PEM { return Trusted(c.CA, c.AcceptedCAs) }

// PublicKeys are those with which tokens of service accounts are verified.
func (s *ServiceAccount) PublicKeys() (PEM, error) {
	var all [][]byte
	for _, key := range append([]KeyPEM{s.Key}, s.AcceptedKeys...) {
		public, err := pki.EncodePublicKey(key)
		if err != nil {
			return nil, err
		}
		all = append(all, public)
	}
	return bundle(all), nil
}

// Digests are, for each authority that the configuration has, a digest of which certificate
// issues and which are accepted; the same for the keys.
func (c *Config) Digests() (map[string]string, error) {
	all := map[string]string{}
	add := func(name string, issuing, trusted PEM) {
		h := sha256.New()
		fmt.Fprintf(h, "%s %d\n%s", name, len(issuing), issuing)
		h.Write(trusted)
		all[name] = hex.EncodeToString(h.Sum(nil)[:digestBytes])
	}
	for _, a := range Authorities {
		if issuing, accepted := a.Of(c); len(issuing.Crt) > 0 {
			add(a.Name, issuing.Crt, Trusted(*issuing, *accepted))
		}
	}
	if s := c.Cluster.ServiceAccount; len(s.Key) > 0 {
		issuing, err := pki.EncodePublicKey(s.Key)
		if err != nil {
			return nil, fmt.Errorf("cluster.serviceAccount.key: %w", err)
		}
		trusted, err := s.PublicKeys()
		if err != nil {
			return nil, fmt.Errorf("cluster.serviceAccount.acceptedKeys: %w", err)
		}
		add(ServiceAccountKey, issuing, trusted)
	}
	if c.Cluster.Secret != "" {
		var accepted PEM
		for _, other := range c.Cluster.AcceptedSecrets {
			accepted = append(accepted, other.ID()...)
		}
		add(AtRestKey, c.Cluster.Secret.ID(), accepted)
	}
	return all, nil
}

// ID tells apart random secrets, and doesn't reveal them.
func (s Secret) ID() PEM {
	sum := sha256.Sum256([]byte(s))
	return pem.EncodeToMemory(&pem.Block{Type: "SHA-256", Bytes: sum[:]})
}

// bundle is PEM text of several parts, in an order that is always the same.
func bundle(parts [][]byte) PEM {
	if len(parts) == 1 {
		return parts[0]
	}
	for i, part := range parts {
		parts[i] = append(slices.Clip(bytes.TrimSpace(part)), '\n') // a copy: the configuration is shared
	}
	slices.SortFunc(parts, bytes.Compare)
	return bytes.Join(slices.CompactFunc(parts, bytes.Equal), nil)
}

// authorityAt is the authority to which a place belongs.
func authorityAt(where place) (a Authority) {
	for _, a := range Authorities {
		for _, path := range [][]string{a.Issuing, a.Accepted} {
			if len(where) > len(path) && where[:len(path)].String() == strings.Join(path, ".") {
				return a
			}
		}
	}
	return a
}
