package config

import (
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"time"

	"github.com/garboard-os/garboard/config/pki"
)

// Secrets are what the nodes of one cluster share and nobody else knows.
type Secrets struct {
	ClusterID      string
	ClusterSecret  Secret
	MachineToken   Secret
	BootstrapToken Secret
	MachineCA      CertKey
	KubernetesCA   CertKey
	AggregatorCA   CertKey
	EtcdCA         CertKey
	ServiceAccount KeyPEM
}

// NewSecrets makes fresh ones, valid from now.
func NewSecrets(now time.Time) (*Secrets, error) {
	s := &Secrets{
		ClusterID:      newKey32(),
		ClusterSecret:  Secret(newKey32()),
		MachineToken:   newToken(),
		BootstrapToken: newToken(),
	}
	for _, a := range []struct {
		to  *CertKey
		new func(time.Time) (pki.CA, error)
	}{
		{&s.MachineCA, pki.NewMachineCA},
		{&s.KubernetesCA, pki.NewKubernetesCA},
		{&s.AggregatorCA, pki.NewAggregatorCA},
		{&s.EtcdCA, pki.NewEtcdCA},
	} {
		ca, err := a.new(now)
		if err != nil {
			return nil, fmt.Errorf("make secrets: %w", err)
		}
		*a.to = CertKey{Crt: ca.Cert, Key: ca.Key}
	}
	key, err := pki.NewServiceAccountKey()
	if err != nil {
		return nil, fmt.Errorf("make secrets: %w", err)
	}
	s.ServiceAccount = key
	return s, nil
}

func newKey32() string {
	key := make([]byte, keyBytes)
	rand.Read(key) // never fails, see crypto/rand
	return base64.StdEncoding.EncodeToString(key)
}

// newToken makes a bootstrap token: 22 characters of 36 kinds, 113 bits.
func newToken() Secret {
	const alphabet = "abcdefghijklmnopqrstuvwxyz0123456789"
	const id, secret = 6, 16
	var token []byte
	for random := make([]byte, 1); len(token) < id+secret; {
		rand.Read(random)
		// Bytes beyond the last whole multiple would favour some letters.
		if b := int(random[0]); b < 256/len(alphabet)*len(alphabet) {
			token = append(token, alphabet[b%len(alphabet)])
		}
	}
	return Secret(string(token[:id]) + "." + string(token[id:]))
}

// Options say what a generated configuration is for. Endpoint is required, the
// rest may be zero.
type Options struct {
	ClusterName string
	// Endpoint is the URL of the Kubernetes API, such as https://10.5.0.2:6443.
	Endpoint string
	Type     MachineType // default Init
	Hostname string
	// InstallDisk is a device such as /dev/vda; none in containers.
	InstallDisk string
	// Mirrors by registry host or "*": URLs in order of preference.
	Mirrors map[string][]string
	// CertSANs go into the certificates of the machine API and of the apiserver.
	CertSANs []string
	// AllowScheduling lets pods run on control planes.
	AllowScheduling bool
	// Secrets are those of an existing cluster; default fresh ones.
	Secrets *Secrets
	// Now is when fresh secrets start to be valid; default the present.
	Now time.Time
}

// Generate makes a complete configuration. Its images are written out, so that
// a node keeps its Kubernetes when its operating system is upgraded; the other
// defaults are left to Load, so that the file stays short. Call FillDefaults to
// use the Config itself.
func Generate(o Options) (*Config, error) {
	if o.Now.IsZero() {
		o.Now = time.Now()
	}
	if o.Secrets == nil {
		secrets, err := NewSecrets(o.Now)
		if err != nil {
			return nil, fmt.Errorf("generate configuration: %w", err)
		}
		o.Secrets = secrets
	}
	keep(&o.Type, Init)
	endpoint, err := ParseURL(o.Endpoint)
	if err != nil {
		return nil, fmt.Errorf("generate configuration: endpoint %q: %w", o.Endpoint, err)
	}
	persist := true
	c := &Config{Version: Version, Persist: &persist}
	c.Machine.Type = o.Type
	c.Machine.CertSANs = o.CertSANs
	c.Machine.Network.Hostname = o.Hostname
	c.Machine.Install.Disk = o.InstallDisk
	c.Machine.Kubelet.Image = DefaultKubeletImage
	for host, endpoints := range o.Mirrors {
		var m Mirror
		for _, text := range endpoints {
			u, err := ParseURL(text)
			if err != nil {
				return nil, fmt.Errorf("generate configuration: mirror of %s: %q: %w", host, text, err)
			}
			m.Endpoints = append(m.Endpoints, u)
		}
		if c.Machine.Registries.Mirrors == nil {
			c.Machine.Registries.Mirrors = map[string]Mirror{}
		}
		c.Machine.Registries.Mirrors[host] = m
	}
	c.Cluster.Name = o.ClusterName
	c.Cluster.ControlPlane.Endpoint = endpoint
	if o.Type.ControlPlane() {
		generateControlPlane(c, o)
	}
	o.Secrets.fill(c)
	if err := c.loads(); err != nil {
		return nil, err
	}
	return c, nil
}

func generateControlPlane(c *Config, o Options) {
	c.Cluster.APIServer.CertSANs = o.CertSANs
	c.Cluster.AllowSchedulingOnControlPlanes = o.AllowScheduling
	c.Cluster.Etcd.Image = DefaultEtcdImage
	c.Cluster.APIServer.Image = DefaultAPIServerImage
	c.Cluster.ControllerManager.Image = DefaultControllerManagerImage
	c.Cluster.Scheduler.Image = DefaultSchedulerImage
	c.Cluster.Proxy.Image = DefaultProxyImage
	c.Cluster.CoreDNS.Image = DefaultCoreDNSImage
	c.Cluster.Network.CNI.Flannel.Image = DefaultFlannelImage
}

// fill gives a node what its part needs to know, and no more.
func (s *Secrets) fill(c *Config) {
	c.Machine.Token, c.Cluster.Token = s.MachineToken, s.BootstrapToken
	c.Cluster.ID, c.Cluster.Secret = s.ClusterID, s.ClusterSecret
	c.Machine.CA, c.Cluster.CA = s.MachineCA, s.KubernetesCA
	if !c.Machine.Type.ControlPlane() {
		c.Machine.CA.Key, c.Cluster.CA.Key = nil, nil
		return
	}
	c.Cluster.AggregatorCA, c.Cluster.Etcd.CA = s.AggregatorCA, s.EtcdCA
	c.Cluster.ServiceAccount.Key = s.ServiceAccount
}

// loads reports what Load says to c as a document: the proof that a node will
// accept it.
func (c *Config) loads() error {
	data, err := c.Encode()
	if err != nil {
		return err
	}
	_, _, err = Load("generated configuration", data)
	return err
}
