// Package roster decides which node may have a name. The facts are those of etcd alone,
// where no pod and no worker can write: its members, which are the control planes; a record
// of each worker, with the key of its machine API; the hashes of the tokens with which machines
// join; and the names of Kubernetes' Nodes. What a Node object says of itself decides nothing.
//
//	trustd ──▶ MaySign: a certificate of the machine API   (the first one binds the name to its key)
//	kubelet ─▶ MayJoin: a client certificate of Kubernetes (proven with that key)
//	kubelet ─▶ MayServe: a serving certificate             (for an address of nobody else)
//
// A name is free while no Node has it: only administrators delete Nodes.
package roster

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/services/core/reason"
)

// Grace is how long a record counts of a worker that hasn't joined: its Node is still to come.
const Grace = 15 * time.Minute

// A Record is of one worker.
type Record struct {
	Key     string     `json:"key"`     // of its machine API (pki.KeyID)
	Address netip.Addr `json:"address"` // from which it asked, as TCP proves
	Since   time.Time  `json:"since"`
	Joined  bool       `json:"joined,omitempty"` // its Node was seen: the name is free when there is none any more

	// Revision of the record in etcd; 0 if there is none.
	Revision int64 `json:"-"`
}

// Facts are what etcd knows of the cluster's nodes. The zero value is a cluster that has
// not begun.
type Facts struct {
	// Names, in lower case, and Addresses are those of the control planes, and of what they share.
	Names     []string
	Addresses []netip.Addr
	Records   map[string]Record
	Nodes     map[string]bool  // Kubernetes has a Node with this name
	Tokens    map[string]Token // by TokenID
	Now       time.Time
}

// Record is the record of a name, if the name isn't free.
func (f Facts) Record(name string) (Record, bool) {
	r, known := f.Records[name]
	return r, known && (f.Nodes[name] || !r.Joined && f.Now.Sub(r.Since) < Grace)
}

// free says how a name becomes free.
func free(name string) string {
	return fmt.Sprintf("give one of the two another machine.network.hostname, or if that one is gone: kubectl delete node %s", name)
}

// MaySign decides about the certificate of the machine API of a node at an address. proven:
// the caller has shown that it is the node of Kubernetes with this name.
func (f Facts) MaySign(name, key string, from netip.Addr, proven bool) error {
	if slices.Contains(f.Addresses, from) {
		return fmt.Errorf("the address %s is one of the control planes'", from)
	}
	return f.mayHave(name, key, proven)
}

// MayJoin decides about a client certificate of Kubernetes. key is that of the machine API
// whose holder made the request, or "".
func (f Facts) MayJoin(name, key string) error { return f.mayHave(name, key, false) }

// mayHave decides about a name. Its errors have the code NameTaken.
func (f Facts) mayHave(name, key string, proven bool) error {
	r, known := f.Record(name)
	switch {
	case slices.Contains(f.Names, strings.ToLower(name)):
		return taken("the name %s is one of the control planes'; give this machine another machine.network.hostname", name)
	case known && r.Key == key, proven:
		return nil
	case known && key == "":
		return taken("the name %s belongs to a machine that signs its requests, and this one isn't signed; %s", name, free(name))
	case known:
		return taken("the name %s belongs to a machine with another key, at %s; %s", name, r.Address, free(name))
	case f.Nodes[name]:
		return taken("there is a node %s, and this machine doesn't show that it is that node; %s", name, free(name))
	}
	return nil
}

// NameTaken is the code of errors about a name that another machine has.
const NameTaken reason.Code = "NameTaken"

func taken(format string, args ...any) error {
	return reason.With(NameTaken, fmt.Errorf(format, args...))
}

// MayServe decides about an address in the serving certificate of a worker's kubelet.
func (f Facts) MayServe(name string, address netip.Addr) error {
	if slices.Contains(f.Addresses, address) {
		return fmt.Errorf("address %s is one of the control planes'", address)
	}
	for other := range f.Records {
		if r, known := f.Record(other); known && other != name && r.Address == address {
			return fmt.Errorf("address %s is also that of node %q", address, other)
		}
	}
	return nil
}
