package kubelet

import (
	"context"
	"encoding/pem"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/machine"
	"github.com/garboard-os/garboard/services/system/network"
)

// credentialsTime is ample for making a few certificates after the node got
// another name.
const credentialsTime = 30 * time.Second

// user is what the API server calls the kubelet of a node (kubernetes.io: node
// authorization).
func user(hostname string) string { return config.NodeUser + hostname }

// awaitIdentity returns once the node's name, address and credentials are those
// of the configuration that applies now: the kubelet may be started anew because
// the name has just changed.
func (o Options) awaitIdentity(ctx context.Context) error {
	if err := network.Await(ctx, o.Store); err != nil {
		return err
	}
	name, err := network.Hostnames.Get(o.Store, network.HostnameID)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, credentialsTime)
	defer cancel()
	text := fmt.Sprintf("kubelet credentials for %s to be made", name.Spec)
	if err := secrets.Await(ctx, o.Store, secrets.KubeletID); err != nil {
		return err
	}
	return secrets.Kubelet.When(o.Store, secrets.KubeletID, text, func(s secrets.KubeletSpec) bool {
		return len(s.Client.Crt) == 0 || nameIn(s.Client.Crt) == user(name.Spec)
	}).Wait(ctx)
}

func nameIn(crt []byte) string {
	cert, err := pki.ParseCert(crt)
	if err != nil {
		return ""
	}
	return cert.Subject.CommonName
}

// forgetOther removes the credentials that the kubelet got under another name: with them it
// may not register this one. It also removes those of a former authority, and expired ones.
// The node asks for new ones.
func forgetOther(hostname string, s secrets.KubeletSpec, client, kubeconfig string) error {
	have, err := untrusted.ReadLinked(client, maxFile)
	if err != nil {
		return boot.IgnoreMissing(err)
	}
	if nameIn(have) == user(hostname) && !former(have, s) && !due(have, time.Now(), 0) {
		return nil
	}
	for _, file := range []string{client, kubeconfig} {
		if err := boot.IgnoreMissing(untrusted.Remove(file)); err != nil {
			return err
		}
	}
	return nil
}

// forgetFormer removes a certificate of a former authority.
func forgetFormer(s secrets.KubeletSpec, file string) error {
	have, err := untrusted.ReadLinked(file, maxFile)
	if err == nil && former(have, s) {
		err = untrusted.Remove(file)
	}
	return boot.IgnoreMissing(err)
}

// former reports whether a certificate is of an authority that is accepted, but doesn't
// issue any more.
func former(have []byte, s secrets.KubeletSpec) bool {
	cert, err := pki.ParseCert(have)
	if err != nil {
		return false
	}
	signed := func(ca []byte) bool {
		authority, err := pki.ParseCert(ca)
		return err == nil && cert.CheckSignatureFrom(authority) == nil
	}
	for block, rest := pem.Decode(s.CA); block != nil; block, rest = pem.Decode(rest) {
		if signed(pem.EncodeToMemory(block)) {
			return !signed(s.Issuing)
		}
	}
	return false
}

// whileAddressed runs the kubelet for as long as the node keeps the addresses that
// it was started with: it doesn't look for others by itself.
func whileAddressed(ctx context.Context, s *resource.Store, run func(context.Context) error) error {
	began, err := network.Addresses.Get(s, network.AddressID)
	if err != nil {
		return err
	}
	was := nodeIPs(s, began.Spec)
	return dag.While(ctx, run, func(ctx context.Context) error {
		for range s.Watch(ctx, network.Addresses.Type()) {
			// An address that is gone for the moment is no reason: pods go on.
			now, err := network.Addresses.Get(s, network.AddressID)
			if err != nil {
				continue
			}
			if is := nodeIPs(s, now.Spec); now.Spec.Primary != began.Spec.Primary || slices.ContainsFunc(is, replaces(was, now.Spec)) {
				return fmt.Errorf("the node's addresses changed from %s to %s", config.Joined(was, " "), config.Joined(is, " "))
			}
		}
		return nil
	})
}

// nodeIPs are the node's addresses in the cluster; without a configuration, the primary one.
func nodeIPs(r resource.Reader, a network.NodeAddress) []netip.Addr {
	cfg, err := machine.Config(r)
	if err != nil {
		return []netip.Addr{a.Primary}
	}
	return cfg.Cluster.Network.NodeIPs(a.Primary, a.All)
}

// replaces is whether an address is new to the kubelet, which has none of its family, or one
// that is gone.
func replaces(was []netip.Addr, now network.NodeAddress) func(netip.Addr) bool {
	return func(a netip.Addr) bool {
		return !slices.ContainsFunc(was, func(old netip.Addr) bool {
			return old.BitLen() == a.BitLen() && (old == now.Primary || slices.ContainsFunc(now.All, func(p netip.Prefix) bool { return p.Addr() == old }))
		})
	}
}
