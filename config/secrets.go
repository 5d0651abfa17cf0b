package config

import (
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"time"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/config/tree"
)

// Secrets are shared by the nodes of one cluster and known only to them.
type Secrets struct {
	ClusterSecret  Secret
	MachineToken   Secret
	BootstrapToken Secret
	MachineCA      CertKey
	KubernetesCA   CertKey
	AggregatorCA   CertKey
	EtcdCA         CertKey
	ServiceAccount KeyPEM
}

// NewSecrets makes new secrets, valid from now.
func NewSecrets(now time.Time) (*Secrets, error) { return newSecrets(pki.ECDSA, now) }

// NewRSASecrets makes new secrets for releases that support only RSA in
// Kubernetes and etcd.
func NewRSASecrets(now time.Time) (*Secrets, error) { return newSecrets(pki.RSA, now) }

func newSecrets(kubernetes pki.Algorithm, now time.Time) (*Secrets, error) {
	s := &Secrets{ClusterSecret: NewKey32(), MachineToken: NewToken(), BootstrapToken: NewToken()}
	for _, a := range []struct {
		to   *CertKey
		alg  pki.Algorithm
		name pkix.Name
	}{
		{&s.MachineCA, pki.Ed25519, pki.MachineName},
		{&s.KubernetesCA, kubernetes, pki.KubernetesName},
		{&s.AggregatorCA, kubernetes, pki.AggregatorName},
		{&s.EtcdCA, kubernetes, pki.EtcdName},
	} {
		ca, err := pki.NewCA(a.alg, a.name, now, pki.CAValidity)
		if err != nil {
			return nil, fmt.Errorf("make secrets: %w", err)
		}
		*a.to = CertKey{Crt: ca.Cert, Key: ca.Key}
	}
	key, err := pki.NewKey(kubernetes)
	if err != nil {
		return nil, fmt.Errorf("make secrets: %w", err)
	}
	s.ServiceAccount = key
	return s, nil
}

// fill gives a node the secrets that its role needs, and no more.
func (s *Secrets) fill(c *Config) {
	c.Machine.Token, c.Cluster.Token = s.MachineToken, s.BootstrapToken
	c.Machine.CA, c.Cluster.CA = s.MachineCA, s.KubernetesCA
	if !c.Machine.Type.ControlPlane() {
		c.Machine.CA.Key, c.Cluster.CA.Key = nil, nil
		return
	}
	c.Cluster.Secret = s.ClusterSecret
	c.Cluster.AggregatorCA, c.Cluster.Etcd.CA = s.AggregatorCA, s.EtcdCA
	c.Cluster.ServiceAccount.Key = s.ServiceAccount
}

// secretsHeader is the comment at the top of the file.
const secretsHeader = `# The secrets of one Garboard cluster, each in its place of the configuration.
# Whoever has them has the cluster: keep them where you keep private keys.
# 'gbctl gen config --with-secrets' makes configurations of further nodes from them.
`

// secretsFile is the file of secrets: a part of the configuration of a control
// plane, so that such a configuration can be read instead.
type secretsFile struct {
	Machine struct {
		Token string   `yaml:"token"`
		CA    textPair `yaml:"ca"`
	} `yaml:"machine"`
	Cluster struct {
		Secret         string   `yaml:"secret,omitempty"`
		Token          string   `yaml:"token"`
		CA             textPair `yaml:"ca"`
		AggregatorCA   textPair `yaml:"aggregatorCA"`
		ServiceAccount struct {
			Key string `yaml:"key"`
		} `yaml:"serviceAccount"`
		Etcd struct {
			CA textPair `yaml:"ca"`
		} `yaml:"etcd"`
	} `yaml:"cluster"`
}

// textPair is the text form of a CertKey.
type textPair struct {
	Crt string `yaml:"crt"`
	Key string `yaml:"key"`
}

// filePair is an authority, with the path of its field.
type filePair struct {
	path string
	text *textPair
	pair *CertKey
}

func (f *secretsFile) pairs(s *Secrets) []filePair {
	return []filePair{
		{"machine.ca", &f.Machine.CA, &s.MachineCA},
		{"cluster.ca", &f.Cluster.CA, &s.KubernetesCA},
		{"cluster.aggregatorCA", &f.Cluster.AggregatorCA, &s.AggregatorCA},
		{"cluster.etcd.ca", &f.Cluster.Etcd.CA, &s.EtcdCA},
	}
}

// Encode is the text of a file of secrets.
func (s *Secrets) Encode() ([]byte, error) {
	f := &secretsFile{}
	f.Machine.Token, f.Cluster.Token = string(s.MachineToken), string(s.BootstrapToken)
	f.Cluster.Secret = string(s.ClusterSecret)
	f.Cluster.ServiceAccount.Key = encodePEM(s.ServiceAccount)
	for _, p := range f.pairs(s) {
		p.text.Crt, p.text.Key = encodePEM(p.pair.Crt), encodePEM(p.pair.Key)
	}
	text, err := tree.Encode(f, indent)
	if err != nil {
		return nil, fmt.Errorf("encode secrets: %w", err)
	}
	return append([]byte(secretsHeader), text...), nil
}

// LoadSecrets reads a file of secrets, or the configuration of a control plane,
// which has them all. name is the document's name in problems; they are reported
// all at once. The cluster's secret may be missing, as in a configuration.
func LoadSecrets(name string, data []byte) (*Secrets, error) {
	f := &secretsFile{}
	if err := yaml.Unmarshal(data, f); err != nil {
		return nil, fmt.Errorf("read secrets %s: %w", name, err)
	}
	s := &Secrets{
		ClusterSecret: Secret(f.Cluster.Secret),
		MachineToken:  Secret(f.Machine.Token), BootstrapToken: Secret(f.Cluster.Token),
	}
	var errs []error
	for _, p := range f.problems(s) {
		errs = append(errs, fmt.Errorf("%s: %w", name, p))
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return s, nil
}

// problems decodes the PEM of f into s and lists what is wrong, in the order of
// the file.
func (f *secretsFile) problems(s *Secrets) (errs []error) {
	bad := func(path string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", path, err))
		}
	}
	bad("machine.token", checkToken(string(s.MachineToken)))
	if key := f.Cluster.Secret; key != "" {
		bad("cluster.secret", checkKey32(key))
	}
	bad("cluster.token", checkToken(string(s.BootstrapToken)))
	for _, p := range f.pairs(s) {
		bad(p.path, p.pair.decode(p.text))
	}
	bad("cluster.serviceAccount.key", func() error {
		if f.Cluster.ServiceAccount.Key == "" {
			return errors.New("is missing")
		}
		if err := s.ServiceAccount.UnmarshalText([]byte(f.Cluster.ServiceAccount.Key)); err != nil {
			return err
		}
		_, err := pki.ParseKey(s.ServiceAccount)
		return err
	}())
	return errs
}

// decode reads an authority with its key.
func (c *CertKey) decode(text *textPair) error {
	if text.Crt == "" || text.Key == "" {
		return errors.New("is missing, or a part of it: crt and key")
	}
	if err := errors.Join(c.Crt.UnmarshalText([]byte(text.Crt)), c.Key.UnmarshalText([]byte(text.Key))); err != nil {
		return err
	}
	_, _, err := c.CA().Parse()
	return err
}
