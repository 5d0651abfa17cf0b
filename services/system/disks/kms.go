package disks

import (
	"context"
	"crypto/tls"
	"crypto/x509/pkix"
	"errors"
	"slices"
	"time"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/api/kms"
	"github.com/garboard-os/garboard/boot/meta"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/luks"
)

// serversKey is what the machine has on META to reach a key server before STATE is open.
var serversKey = meta.Key[servers]{Name: "kms"}

type servers struct {
	// Identity is the key by which servers know the machine, in a certificate of its own.
	Identity pki.CA `json:"identity"`
	// Networks are the last two of the configuration, the newest first, as documents without secrets: a new one may not
	// reach the server.
	Networks []string `json:"networks"`
}

// useServers changes the value.
func (d *Disks) useServers(use func(*servers) error) error {
	return d.useMeta(func(c meta.Change) error {
		s, err := serversKey.In(c)
		if err == nil {
			err = use(&s)
		}
		if err != nil {
			return err
		}
		return serversKey.Put(c, s)
	})
}

// server seals keys of this machine (luks.Sealer).
type server struct {
	Endpoint string `json:"endpoint"`
	CA       []byte `json:"ca"`
	disks    *Disks
}

// Seal implements luks.Sealer.
func (s *server) Seal(ctx context.Context, passphrase []byte) ([]byte, error) {
	return s.client(ctx).Seal(ctx, passphrase)
}

// Unseal implements luks.Sealer.
func (s *server) Unseal(ctx context.Context, sealed []byte) ([]byte, error) {
	return s.client(ctx).Unseal(ctx, sealed)
}

// Lasts implements luks.Sealer.
func (s *server) Lasts([]byte) bool { return true }

func (s *server) client(ctx context.Context) *kms.Client {
	d := s.disks
	c := &kms.Client{Endpoint: s.Endpoint, CA: s.CA, Patience: d.o.serverPatience}
	if d.opened.Load() { // others wait for the disks
		c.Patience = 0
	}
	if c.UUID, c.Err = luks.UUID(d.o.uuidFile); c.Err != nil {
		return c
	}
	var networks []string
	c.Err = d.useServers(func(s *servers) (err error) {
		if s.Identity.Cert == nil {
			s.Identity, err = pki.NewCA(pki.Ed25519, pkix.Name{CommonName: c.UUID}, time.Now(), pki.CAValidity)
		}
		if networks = s.Networks; err == nil {
			c.Identity, err = tls.X509KeyPair(s.Identity.Cert, s.Identity.Key)
		}
		return err
	})
	if _, err := configuration.Config(d.o.Store); c.Err == nil && err != nil {
		c.Err = d.early(ctx, networks)
	}
	return c
}

// early has the network start before there is a configuration. Each time it is another one of the kept networks.
func (d *Disks) early(ctx context.Context, kept []string) error {
	if len(kept) == 0 || d.asked > 0 && len(kept) == 1 {
		return d.o.Network(ctx, nil)
	}
	var c config.Config
	err := yaml.Unmarshal([]byte(kept[d.asked%len(kept)]), &c)
	d.asked++
	return errors.Join(err, d.o.Network(ctx, &c.Machine.Network))
}

// keepNetwork writes the network of the configuration to META, if a server's key opens STATE.
func (d *Disks) keepNetwork() error {
	cfg, err := configuration.Config(d.o.Store)
	state := (*config.Encryption)(nil)
	if err == nil {
		state = cfg.Machine.SystemDiskEncryption.State
	}
	if state == nil || !slices.ContainsFunc(state.Keys, func(k config.EncryptionKey) bool { return k.KMS != nil }) {
		return resource.IgnoreNotFound(err)
	}
	text, err := networkText(cfg.Machine.Network)
	if err != nil {
		return err
	}
	return d.useServers(func(s *servers) error {
		if all := s.Networks; len(all) == 0 || all[0] != text {
			s.Networks = append([]string{text}, all[:min(len(all), 1)]...)
		}
		return nil
	})
}

// networkText is a network as a document, without interfaces that need a secret.
func networkText(n config.Network) (string, error) {
	n.Firewall = config.Firewall{}
	n.Interfaces = slices.DeleteFunc(slices.Clone(n.Interfaces), func(i config.Interface) bool { return i.WireGuard != nil })
	c := config.Config{Machine: config.Machine{Network: n}}
	text, err := c.Encode()
	return string(text), err
}
