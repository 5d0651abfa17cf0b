package controlplane

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
)

const (
	// issuersKey has the endpoints of the control plane, one in each key, the last written first: a token of a service
	// account names that of its time as its issuer and its audience.
	issuersKey = "/garboard.dev/service-account-issuers/"
	// maxIssuers are accepted: that of today, and the last ones.
	maxIssuers     = 8
	issuersTimeout = 5 * time.Second
	// issuersPeriod is how soon a control plane accepts what another one signs with a new endpoint.
	issuersPeriod = 10 * time.Second
)

// IssuerController records the endpoint of the control plane, and learns the former ones.
type IssuerController struct {
	record func(ctx context.Context, r resource.Reader, member, endpoint string) ([]string, error)
}

func (c *IssuerController) Reconcile(ctx context.Context, v resource.View) (time.Duration, error) {
	api, err := Configs.Get(v, apiServer)
	member, ready := etcd.Ready(v)
	if err != nil || !ready {
		return 0, resource.IgnoreNotFound(err)
	}
	ctx, cancel := context.WithTimeout(ctx, issuersTimeout)
	defer cancel()
	all, failed := c.record(ctx, v, member.Endpoint, api.Spec.(APIServerConfig).ControlPlaneEndpoint)
	// the API server doesn't wait for what fails
	if _, err := secrets.Issuers.Get(v, secrets.IssuersID); failed == nil || err != nil {
		err = secrets.Issuers.Put(v, secrets.IssuersID, all)
		failed = cmp.Or(failed, err)
	}
	return issuersPeriod, failed
}

// issuersOf are those of tokens that are accepted; the first one signs. There are none before etcd was asked.
func issuersOf(r resource.Reader) []string {
	api, err := Configs.Get(r, apiServer)
	known, none := secrets.Issuers.Get(r, secrets.IssuersID)
	if cmp.Or(err, none) != nil {
		return nil
	}
	today := api.Spec.(APIServerConfig).ControlPlaneEndpoint
	former := slices.DeleteFunc(slices.Clone(known.Spec), func(i string) bool { return i == today })
	return append([]string{today}, former[:min(len(former), maxIssuers-1)]...)
}

// RecordIssuer makes all control planes accept tokens of an endpoint.
func RecordIssuer(ctx context.Context, r resource.Reader, endpoint string) error {
	return onMember(ctx, r, func(ctx context.Context, member string) error {
		_, err := recordIssuer(ctx, r, member, endpoint)
		return err
	})
}

// recordIssuer adds the endpoint of today to etcd, and returns all.
func recordIssuer(ctx context.Context, r resource.Reader, member, endpoint string) ([]string, error) {
	client, err := etcd.Dial(ctx, r, member)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	found, err := client.Get(ctx, issuersKey, clientv3.WithPrefix(), clientv3.WithKeysOnly(),
		clientv3.WithSort(clientv3.SortByModRevision, clientv3.SortDescend), clientv3.WithLimit(maxIssuers))
	if err != nil {
		return nil, fmt.Errorf("look for the former issuers of tokens in etcd: %w", err)
	}
	var all []string
	for _, kv := range found.Kvs {
		all = append(all, strings.TrimPrefix(string(kv.Key), issuersKey))
	}
	if slices.Contains(all, endpoint) {
		return all, nil // as nearly always: otherwise it would be a write to the disk of each member
	}
	// also of one that was forgotten, which is the last one again
	if _, err := client.Put(ctx, issuersKey+endpoint, ""); err != nil {
		return nil, fmt.Errorf("record the issuer of tokens in etcd: %w", err)
	}
	return append([]string{endpoint}, all...), nil
}
