package disks

import (
	"context"
	"crypto/tls"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/api/kms"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/meta"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/machine"
)

// What the machine has on META to reach a key server before STATE is open.
var (
	// identity is the key by which servers know the machine, in a certificate of its own.
	identity = meta.Key[pki.CA]{Name: "kms-identity"}
	// keptNetworks are the last two of the configuration, the newest first, as documents without secrets: a new one
	// may not reach the server.
	keptNetworks = meta.Key[[]string]{Name: "kms-networks"}
)

// server seals keys of this machine (luks.Sealer).
type server struct {
	Endpoint string `json:"endpoint"`
	CA       []byte `json:"ca"`
	disks    *Disks
}

// Seal implements luks.Sealer.
func (s *server) Seal(ctx context.Context, passphrase []byte) ([]byte, error) {
	c, err := s.client(ctx)
	if err != nil {
		return nil, err
	}
	return c.Seal(ctx, passphrase)
}

// Unseal implements luks.Sealer.
func (s *server) Unseal(ctx context.Context, sealed []byte) ([]byte, error) {
	c, err := s.client(ctx)
	if err != nil {
		return nil, err
	}
	return c.Unseal(ctx, sealed)
}

func (s *server) client(ctx context.Context) (*kms.Client, error) {
	d := s.disks
	uuid, err := uuidIn(d.o.uuidFile)
	if err != nil {
		return nil, err
	}
	var own pki.CA
	err = d.useMeta(func(c meta.Change) (err error) {
		if own, err = identity.In(c); !errors.Is(err, meta.ErrNotFound) {
			return err
		}
		if own, err = pki.NewCA(pki.Ed25519, pkix.Name{CommonName: uuid}, time.Now(), pki.CAValidity); err != nil {
			return err
		}
		return identity.Put(c, own)
	})
	if err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(own.Cert, own.Key)
	if err == nil {
		err = d.early(ctx)
	}
	return &kms.Client{Endpoint: s.Endpoint, CA: s.CA, Identity: pair, UUID: uuid, Patience: d.o.serverPatience}, err
}

// uuidIn is the UUID by which a list names the machine.
func uuidIn(file string) (string, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return "", fmt.Errorf("a kms key needs the machine's UUID: %w", err)
	}
	return strings.TrimSpace(string(text)), nil
}

// early has the network start before there is a configuration. Each time it is another one of the kept networks.
func (d *Disks) early(ctx context.Context) error {
	if _, err := machine.Config(d.o.Store); !errors.Is(err, resource.ErrNotFound) {
		return err
	}
	var all []string
	err := d.useMeta(func(c meta.Change) (err error) {
		if all, err = keptNetworks.In(c); errors.Is(err, meta.ErrNotFound) {
			return nil
		}
		return err
	})
	if err != nil || len(all) == 0 || d.asked > 0 && len(all) == 1 {
		return errors.Join(err, d.o.Network(ctx, nil))
	}
	var c config.Config
	err = yaml.Unmarshal([]byte(all[d.asked%len(all)]), &c)
	d.asked++
	return errors.Join(err, d.o.Network(ctx, &c.Machine.Network))
}

// keepNetwork writes the network of the configuration to META, if a server's key opens STATE.
func (d *Disks) keepNetwork() error {
	cfg, err := machine.Config(d.o.Store)
	if err != nil || d.o.Mode == boot.Container || !ofServer(cfg.Machine.SystemDiskEncryption.State) {
		return resource.IgnoreNotFound(err)
	}
	text, err := networkText(cfg.Machine.Network)
	if err != nil {
		return err
	}
	return d.useMeta(func(c meta.Change) error {
		all, err := keptNetworks.In(c)
		if err != nil && !errors.Is(err, meta.ErrNotFound) || len(all) > 0 && all[0] == text {
			return err
		}
		return keptNetworks.Put(c, append([]string{text}, all[:min(len(all), 1)]...))
	})
}

func ofServer(e *config.Encryption) bool {
	return e != nil && slices.ContainsFunc(e.Keys, func(k config.EncryptionKey) bool { return k.KMS != nil })
}

// networkText is a network as a document, without interfaces that need a secret.
func networkText(n config.Network) (string, error) {
	n.Firewall = config.Firewall{}
	n.Interfaces = slices.DeleteFunc(slices.Clone(n.Interfaces), func(i config.Interface) bool { return i.WireGuard != nil })
	c := config.Config{Machine: config.Machine{Network: n}}
	text, err := c.Encode()
	return string(text), err
}
