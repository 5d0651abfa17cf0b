package kubeclient

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"
)

// aggregated asks for the discovery of all groups in one document; v2 is in
// Kubernetes since 1.30.
const aggregated = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"

type groupVersionKind struct{ groupVersion, kind string }

// Mapping is where the objects of a kind live.
type Mapping struct {
	GroupVersion string // "v1", "apps/v1"
	Resource     string // "pods"
	Namespaced   bool
}

// defaultNamespace has the objects whose manifests name none, as with kubectl.
const defaultNamespace = "default"

// path is the URL of the object called name, or of the collection if name is "".
func (m Mapping) path(namespace, name string) string {
	path := "/api/" + m.GroupVersion
	if strings.Contains(m.GroupVersion, "/") {
		path = "/apis/" + m.GroupVersion
	}
	if namespace == "" && name != "" {
		namespace = defaultNamespace
	}
	if m.Namespaced && namespace != "" {
		path += "/namespaces/" + url.PathEscape(namespace)
	}
	path += "/" + m.Resource
	if name != "" {
		path += "/" + url.PathEscape(name)
	}
	return path
}

// discoveryList is the part that is used of APIGroupDiscoveryList
// (apidiscovery.k8s.io/v2).
type discoveryList struct {
	Items []struct {
		Metadata struct {
			Name string `json:"name"` // the group; "" is core
		} `json:"metadata"`
		Versions []struct {
			Version   string `json:"version"`
			Resources []struct {
				Resource     string `json:"resource"`
				Scope        string `json:"scope"`
				ResponseKind struct {
					Kind string `json:"kind"`
				} `json:"responseKind"`
			} `json:"resources"`
		} `json:"versions"`
	} `json:"items"`
}

// discover reads both discovery documents: the core group has its own.
func (c *Client) discover(ctx context.Context) (map[groupVersionKind]Mapping, error) {
	found := map[groupVersionKind]Mapping{}
	for _, path := range []string{"/api", "/apis"} {
		var list discoveryList
		if err := c.do(ctx, request{method: http.MethodGet, path: path, accept: aggregated}, &list); err != nil {
			return nil, err
		}
		for _, group := range list.Items {
			for _, version := range group.Versions {
				gv := strings.TrimPrefix(group.Metadata.Name+"/"+version.Version, "/")
				for _, r := range version.Resources {
					found[groupVersionKind{gv, r.ResponseKind.Kind}] = Mapping{GroupVersion: gv, Resource: r.Resource, Namespaced: r.Scope == "Namespaced"}
				}
			}
		}
	}
	return found, nil
}

// Mapping finds where objects of a kind live. A kind that isn't known is looked
// for once more at the server: a CustomResourceDefinition may have come since.
func (c *Client) Mapping(ctx context.Context, apiVersion, kind string) (Mapping, error) {
	key := groupVersionKind{apiVersion, kind}
	c.mu.Lock()
	m, ok := c.mappings[key]
	c.mu.Unlock()
	if ok {
		return m, nil
	}
	found, err := c.discover(ctx)
	if err != nil {
		return Mapping{}, err
	}
	c.mu.Lock()
	c.mappings = found
	c.mu.Unlock()
	m, ok = found[key]
	if !ok {
		return Mapping{}, &StatusError{Code: http.StatusNotFound, Reason: "NotFound", Message: fmt.Sprintf("no matches for kind %q in version %q", kind, apiVersion)}
	}
	return m, nil
}
