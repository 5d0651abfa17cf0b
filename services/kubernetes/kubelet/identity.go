package kubelet

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/configuration"
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
// may not register this one. It also removes those of a former authority, expired ones, and what is none.
// The node asks for new ones.
func forgetOther(hostname string, s secrets.KubeletSpec, client, kubeconfig string) error {
	have, err := untrusted.ReadLinked(client, maxFile)
	if err == nil && nameIn(have) == user(hostname) && !former(have, s) && !due(have, time.Now(), 0) {
		return nil
	}
	return errors.Join(untrusted.RemoveAll(client), untrusted.RemoveAll(kubeconfig))
}

// forgetFormer removes a certificate of a former authority, and what is none.
func forgetFormer(s secrets.KubeletSpec, file string) error {
	have, err := untrusted.ReadLinked(file, maxFile)
	if err == nil && !former(have, s) {
		return nil
	}
	return untrusted.RemoveAll(file)
}

// forgetForeign removes a certificate that is of none of the accepted authorities, if Kubernetes refuses it: a pod may
// have left it. The cluster may have an authority that this node doesn't know yet, so ask tries it. Without an answer,
// the node waits.
func forgetForeign(client string, s secrets.KubeletSpec, ask func() error) error {
	have, err := untrusted.ReadLinked(client, maxFile)
	if accepted, _ := signed(have, s); accepted || err != nil {
		return err
	}
	if err = ask(); kubeclient.IsRefused(err) {
		return errors.Join(fmt.Errorf("removed a certificate of another authority: %w", err), untrusted.RemoveAll(client))
	}
	return err
}

// former reports whether a certificate is of an authority that is accepted, but doesn't
// issue any more.
func former(have []byte, s secrets.KubeletSpec) bool {
	accepted, issuing := signed(have, s)
	return accepted && !issuing
}

// signed reports whether a certificate is of an accepted authority, and of the one that issues.
func signed(have []byte, s secrets.KubeletSpec) (accepted, issuing bool) {
	cert, err := pki.ParseCert(have)
	if err != nil {
		return false, false
	}
	accepted = pki.SignedBy(cert, s.CA)
	return accepted, accepted && pki.IssuedBy(cert, s.Issuing)
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
	cfg, err := configuration.Config(r)
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
