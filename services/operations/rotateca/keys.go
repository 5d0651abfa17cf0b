package rotateca

import (
	"crypto/rsa"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/lists"
)

// keys are those of control planes that have no certificate. In the place of one is what identifies the key, which
// isn't secret: its public part, or a hash.
var keys = []config.Authority{
	{Name: config.ServiceAccountKey, Issuing: []string{"cluster", "serviceAccount", "key"}, Accepted: []string{"cluster", "serviceAccount", "acceptedKeys"}},
	{Name: config.AtRestKey, Issuing: []string{"cluster", "secret"}, Accepted: []string{"cluster", "acceptedSecrets"}},
}

// pairs are what a configuration has of a name, the one in use first.
func pairs(c *config.Config, name string) (all []config.CertKey) {
	switch name {
	case config.ServiceAccountKey:
		for _, key := range append([]config.KeyPEM{c.Cluster.ServiceAccount.Key}, c.Cluster.ServiceAccount.AcceptedKeys...) {
			public, _ := pki.EncodePublicKey(key) // the configuration was checked
			all = append(all, config.CertKey{Crt: public, Key: key})
		}
	case config.AtRestKey:
		for _, secret := range append([]config.Secret{c.Cluster.Secret}, c.Cluster.AcceptedSecrets...) {
			all = append(all, config.CertKey{Crt: secret.ID(), Key: config.KeyPEM(secret)})
		}
	default:
		a, _ := authority(name)
		issuing, accepts := a.Of(c)
		all = append([]config.CertKey{*issuing}, *accepts...)
	}
	return all
}

func setPairs(c *config.Config, name string, all []config.CertKey) {
	switch a, found := authority(name); {
	case found:
		issuing, accepts := a.Of(c)
		*issuing, *accepts = all[0], all[1:]
	case name == config.ServiceAccountKey:
		accepted := lists.Of(all[1:], func(k config.CertKey) config.KeyPEM { return k.Key })
		c.Cluster.ServiceAccount = config.ServiceAccount{Key: all[0].Key, AcceptedKeys: accepted}
	default:
		c.Cluster.Secret = config.Secret(all[0].Key)
		c.Cluster.AcceptedSecrets = lists.Of(all[1:], func(k config.CertKey) config.Secret { return config.Secret(k.Key) })
	}
}

// another makes one of the same kind.
func another(name string, old config.CertKey) (made config.CertKey, err error) {
	switch name {
	case config.ServiceAccountKey:
		algorithm := pki.ECDSA
		if key, _ := pki.ParseKey(old.Key); key != nil {
			if _, yes := key.(*rsa.PrivateKey); yes {
				algorithm = pki.RSA
			}
		}
		if made.Key, err = pki.NewKey(algorithm); err == nil {
			made.Crt, err = pki.EncodePublicKey(made.Key)
		}
		return made, err
	case config.AtRestKey:
		secret := config.NewKey32()
		return config.CertKey{Crt: secret.ID(), Key: config.KeyPEM(secret)}, nil
	}
	return newAuthority(old)
}
