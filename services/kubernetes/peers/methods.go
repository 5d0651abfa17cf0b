package peers

import (
	"context"
	"net/netip"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/api/garboardv1/garboardv1connect"
)

// Version of the system.
func (c *Client) Version(ctx context.Context, node netip.Addr) (*apiv1.VersionResponse, error) {
	res := &apiv1.VersionResponse{}
	return res, c.call(ctx, node, garboardv1connect.NodeServiceVersionProcedure, &apiv1.VersionRequest{}, res)
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

// Beginning asks a control plane whether it begins a cluster, or is a member of one.
func (c *Client) Beginning(ctx context.Context, node netip.Addr) (*apiv1.BeginningResponse, error) {
	res := &apiv1.BeginningResponse{}
	return res, c.call(ctx, node, garboardv1connect.EtcdServiceBeginningProcedure, &apiv1.BeginningRequest{}, res)
}
