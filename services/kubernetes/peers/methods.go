package peers

import (
	"bytes"
	"context"
	"net/netip"
	"time"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
	"github.com/garboard-os/garboard/config"
)

// Version of the system.
func (c *Client) Version(ctx context.Context, node netip.Addr) (*apiv1.VersionResponse, error) {
	res := &apiv1.VersionResponse{}
	return res, c.call(ctx, node, garboardv1connect.NodeServiceVersionProcedure, &apiv1.VersionRequest{}, res)
}

// AcceptedBy calls a node with a certificate of an authority: it fails if the node doesn't
// accept that one.
func (c *Client) AcceptedBy(ctx context.Context, node netip.Addr, ca config.CertKey) error {
	now, err := c.current()
	if err != nil {
		return err
	}
	s, err := newSession(ca, now.trusted, now.node, now.endpoint, c.Now())
	if err != nil {
		return err
	}
	defer s.close()
	return c.callBy(ctx, s, s.transport, node, garboardv1connect.NodeServiceVersionProcedure, &apiv1.VersionRequest{}, &apiv1.VersionResponse{})
}

// Services are the states of all services: what is up, and what the others wait for.
func (c *Client) Services(ctx context.Context, node netip.Addr) ([]*apiv1.Service, error) {
	res := &apiv1.ListServicesResponse{}
	err := c.call(ctx, node, garboardv1connect.ServiceServiceListProcedure, &apiv1.ListServicesRequest{}, res)
	return res.GetServices(), err
}

// Resources of a type, with secrets redacted; all of them if id is empty.
func (c *Client) Resources(ctx context.Context, node netip.Addr, typ, id string) ([]*apiv1.Resource, error) {
	res := &apiv1.ListResourcesResponse{}
	err := c.call(ctx, node, garboardv1connect.ResourceServiceListProcedure, &apiv1.ListResourcesRequest{Type: typ, Id: id}, res)
	return res.GetItems(), err
}

// Config is the configuration with secrets redacted, and its digest, for Patch.
func (c *Client) Config(ctx context.Context, node netip.Addr) (*apiv1.GetConfigResponse, error) {
	res := &apiv1.GetConfigResponse{}
	return res, c.call(ctx, node, garboardv1connect.ConfigServiceGetProcedure, &apiv1.GetConfigRequest{}, res)
}

// Patch changes the configuration by a strategic merge patch, now and without a reboot.
// base is the digest of what Config returned: if the configuration has changed since,
// nothing is done, and the error has the code Aborted. Only control planes get a patch with
// keys.
func (c *Client) Patch(ctx context.Context, node netip.Addr, base string, patch []byte) (*apiv1.ApplyConfigResponse, error) {
	req := &apiv1.ApplyConfigRequest{Patch: patch, Base: base, Mode: apiv1.ApplyMode_APPLY_MODE_IMMEDIATE}
	res := &apiv1.ApplyConfigResponse{}
	s, err := c.current()
	if err != nil {
		return res, failed(node, garboardv1connect.ConfigServiceApplyProcedure, err)
	}
	through := s.transport
	if redacted, err := config.Redact(patch); err != nil || !bytes.Equal(redacted, patch) {
		through = s.control
	}
	return res, c.callBy(ctx, s, through, node, garboardv1connect.ConfigServiceApplyProcedure, req, res)
}

// pullTimeout is longer than a node tries, so that its reason arrives.
const pullTimeout = 2*time.Hour + time.Minute

// Pull pulls an image on a node, for pods or for the system's own services, and returns its
// digest. report, with bytes, is called about each second.
func (c *Client) Pull(ctx context.Context, node netip.Addr, image string, kubernetes bool, report func(done, total uint64)) (digest string, err error) {
	req, res := &apiv1.PullImageRequest{Image: image, Kubernetes: kubernetes}, &apiv1.PullImageProgress{}
	err = c.stream(ctx, node, garboardv1connect.ImageServicePullProcedure, pullTimeout, req, res, func() {
		if res.GetDigest() == "" {
			report(res.GetDone(), res.GetTotal())
		}
	})
	return res.GetDigest(), err
}

// Beginning asks a control plane whether it begins a cluster, or is a member of one.
func (c *Client) Beginning(ctx context.Context, node netip.Addr) (*apiv1.BeginningResponse, error) {
	res := &apiv1.BeginningResponse{}
	return res, c.call(ctx, node, garboardv1connect.EtcdServiceBeginningProcedure, &apiv1.BeginningRequest{}, res)
}
